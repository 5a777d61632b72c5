# shellcheck shell=bash disable=SC2034
# Sourced by scripts/demo and scripts/test, from the top of the repository: installs missing
# packages, configures and builds. A function that cannot go on prints the reason, in one sentence,
# and ends the script.

say() { printf '== %s\n' "$*"; }

fail() {
  printf '\n== %s did not finish: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# The commands and headers that the build needs, each with Debian's and Ubuntu's package for it.
tools=("cmake cmake" "ninja ninja-build" "c++ g++")
headers=("caf/all.hpp libcaf-dev" "caf/io/all.hpp libcaf-dev" "spdlog/spdlog.h libspdlog-dev"
  "CLI/CLI.hpp libcli11-dev" "openssl/ssl.h libssl-dev")
test_headers=("nlohmann/json.hpp nlohmann-json3-dev" "gtest/gtest.h libgtest-dev" "gmock/gmock.h libgmock-dev"
  "dlpack/dlpack.h libdlpack-dev" "cblas.h libopenblas-dev")
# Python modules that sphinx-build needs, each with its package. Empty: none.
sphinx_modules=()
# Installed together with the others, but no reason to install anything.
extras=(ccache pkg-config)

# Prints the missing packages; "$@" are pairs of a header and its package.
missing_packages() {
  local pair
  for pair in "${tools[@]}"; do
    command -v "${pair% *}" >/dev/null || echo "${pair#* }"
  done
  local python
  python=$(sed -n '1s/^#! *//p' "$(command -v sphinx-build || echo /dev/null)")
  for pair in "${sphinx_modules[@]}"; do
    # shellcheck disable=SC2086 # it may be "/usr/bin/env python3"
    ${python:-false} -c "import ${pair% *}" >/dev/null 2>&1 || echo "${pair#* }"
  done
  local cxx=${CXX:-c++}
  if ! command -v "$cxx" >/dev/null; then
    for pair in "$@"; do echo "${pair#* }"; done
    return
  fi
  # One run of the preprocessor, which searches the same folders as the compiler.
  for pair in "$@"; do
    printf '#if !__has_include(<%s>)\nMISSING %s\n#endif\n' "${pair% *}" "${pair#* }"
  done | "$cxx" -std=c++20 -E -P -x c++ - | sed -n 's/^MISSING //p' | tr -d ' '
}

# need HEADER-PACKAGE...: installs the packages that are missing, if any.
need() {
  local packages
  mapfile -t packages < <(missing_packages "$@" | sort -u)
  if ((${#packages[@]})); then
    install_packages "${packages[@]}" "${extras[@]}"
    mapfile -t packages < <(missing_packages "$@" | sort -u)
    ((${#packages[@]} == 0)) ||
      fail "after the installation there is still no sign of: ${packages[*]}."
  fi
  local version
  version=$(cmake --version | sed -n '1s/.*version //p')
  [ "$(printf '%s\n' 3.25 "$version" | sort -V | head -n 1)" = 3.25 ] ||
    fail "CMake $version is too old, 3.25 is needed (Debian 12 and Ubuntu 24.04 have it)."
}

install_packages() {
  local by_hand="apt-get install $*"
  command -v apt-get >/dev/null ||
    fail "these Debian packages, or what they hold, are missing, and there is no apt here: $*."
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
      fail "packages are missing, and neither root nor sudo is here to install them: $by_hand."
    as_root=(sudo)
  fi
  say "installing with apt: $*"
  as_root+=(env DEBIAN_FRONTEND=noninteractive apt-get -q)
  "${as_root[@]}" update || say "apt-get update failed; going on with the package lists of before"
  "${as_root[@]}" install -y --no-install-recommends "$@" ||
    fail "apt could not install what is missing; try it by hand: $by_hand."
}

# configure PRESET [OPTION...]: uses the CAF that apt installs. The whole output is in the build
# folder, and shown on failure.
configure() {
  local preset=$1 log="build/$1/configure.log"
  shift
  mkdir -p "build/$preset"
  say "configuring (preset $preset)"
  cmake --preset "$preset" -DTROUPE_CAF=0.17 "$@" >"$log" 2>&1 || {
    cat "$log"
    fail "the configuration failed; its output is above."
  }
  grep '^-- troupe ' "$log" || true
}

# Prints the number of jobs to compile with: one for each core, if each has 1.5 GiB of memory.
count_jobs() {
  local jobs by_memory
  jobs=$(nproc)
  by_memory=$(awk '/^MemAvailable:/ { print int($2 / 1572864) }' /proc/meminfo)
  ((by_memory >= jobs)) || jobs=$((by_memory > 0 ? by_memory : 1))
  echo "$jobs"
}

# build PRESET [OPTION...]
build() {
  local preset=$1 jobs
  shift
  jobs=$(count_jobs)
  say "building with $jobs jobs (the first time takes some minutes)"
  NINJA_STATUS='[%f/%t, %es] ' cmake --build --preset "$preset" --parallel "$jobs" "$@" ||
    fail "the build failed; the first error is above."
}

# build_site PRESET: the guide and the reference, as HTML. A warning is an error.
build_site() {
  say "building the site: build/$1/site/index.html"
  cmake --build --preset "$1" --target docs ||
    fail "the site could not be built; the warnings are above."
}

# Prints the number of NVIDIA GPUs that this machine shows.
count_gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ] && [ -z "$CUDA_VISIBLE_DEVICES" ]; then
    echo 0
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
  else
    find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | wc -l
  fi
}
