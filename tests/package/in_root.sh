#!/bin/sh
# Runs as root in a bare Debian system that has the packages in /packages, and this folder in
# /outside (scripts/test-packages): in_root.sh programs, then development, then removal.
set -eu

install() { apt-get -q install -y --no-install-recommends "$@"; }

case $1 in
programs) # with the shared library, without anything to compile
  install /packages/libtroupe[0-9]*.deb /packages/troupe-tools_*.deb
  test ! -e /usr/include/troupe
  if command -v c++; then exit 1; fi
  troupe-flight --help
  troupe-worker --help
  echo "passed: troupe-flight and troupe-worker start"
  ;;
development) # a user's project, with CMake and with pkg-config
  install /packages/libtroupe-blas*.deb /packages/libtroupe-dev_*.deb g++ cmake make pkg-config
  cmake -S /outside/outside -B /outside/build -DOUTSIDE_FROM=package
  cmake --build /outside/build
  ldd /outside/build/outside | grep 'libtroupe\.so.* => .*/usr/lib\|libtroupe\.so.* => /lib'
  cd /outside/build
  ctest --output-on-failure --no-tests=error
  cmake -DPKG_CONFIG=pkg-config -DCXX=c++ -DCXXFLAGS= -DPKG_CONFIG_DIR= -DLIBRARY_DIRS= -DSTATIC=0 \
    -DSOURCES=/outside/outside -DPROGRAMS=/outside/with-pkg-config \
    -P /outside/pkg_config.cmake
  echo "passed: tests/package/outside, with CMake and with pkg-config"
  ;;
removal) # nothing stays
  apt-get -q purge -y libtroupe-dev troupe-tools 'libtroupe[0-9]*' 'libtroupe-blas*'
  left=$(find / -xdev -path /packages -prune -o -path /outside -prune -o -path /proc -prune -o \
    -name '*troupe*' -print)
  test -z "$left" || { echo "left behind: $left"; exit 1; }
  echo "passed: nothing is left after the removal"
  ;;
*)
  echo "what is $1?" >&2
  exit 2
  ;;
esac
