# Runs cpack in BUILD_DIR, with the output in WORK, and checks what the packages have.
#
#   SHARED            whether the library is a shared one: only then there is a runtime package
#   SONAME            its version, as 0.1
#   CAF_LIBRARY_DIR   the folder of CAF's libraries
#   SOURCE_DIR        the sources of troupe; all headers in include/ must be in the packages

cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE "${WORK}")

function(run_cpack generator)
  execute_process(
    COMMAND "${CPACK}" -G "${generator}" --config "${BUILD_DIR}/CPackConfig.cmake" -C "${CONFIG}"
      -B "${WORK}"
    OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE result)
  if(result)
    message(FATAL_ERROR "cpack -G ${generator} failed:\n${output}")
  endif()
endfunction()

# Sets `result` to the files of one tree, relative to it, without their folders.
function(files_of tree result)
  file(GLOB_RECURSE files LIST_DIRECTORIES FALSE RELATIVE "${tree}" "${tree}/*")
  set(${result} "${files}" PARENT_SCOPE)
endfunction()

# unpack_deb(<name> <result>): the files of the package <name>, of which there must be one.
function(unpack_deb name result)
  file(GLOB deb "${WORK}/${name}_*.deb")
  list(LENGTH deb count)
  if(NOT count EQUAL 1)
    message(FATAL_ERROR "there is not one package ${name}, but ${count}: ${deb}")
  endif()
  execute_process(COMMAND "${DPKG_DEB}" --extract "${deb}" "${WORK}/${name}"
    COMMAND_ERROR_IS_FATAL ANY)
  files_of("${WORK}/${name}" files)
  set(${result} "${files}" PARENT_SCOPE)
endfunction()

# expect_depends(<name> <pattern>...): the field Depends of a package.
function(expect_depends name)
  file(GLOB deb "${WORK}/${name}_*.deb")
  execute_process(COMMAND "${DPKG_DEB}" --field "${deb}" Depends
    OUTPUT_VARIABLE depends OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  foreach(pattern IN LISTS ARGN)
    if(NOT ", ${depends}," MATCHES ", ${pattern}[ ,]")
      message(SEND_ERROR "${name} does not depend on ${pattern}, but on: ${depends}")
    endif()
  endforeach()
endfunction()

# expect_files(<what> <files> <expected>...): exactly these files; an expected one is a pattern.
function(expect_files what files)
  foreach(pattern IN LISTS ARGN)
    set(found "${files}")
    list(FILTER found INCLUDE REGEX "^${pattern}$")
    list(LENGTH found count)
    if(NOT count EQUAL 1)
      message(SEND_ERROR "${what} should have one file ${pattern}, but has: ${found}")
    endif()
    list(REMOVE_ITEM files ${found})
  endforeach()
  if(files)
    message(SEND_ERROR "${what} should not have: ${files}")
  endif()
endfunction()

set(lib "lib(/[^/]*-linux-gnu[^/]*)?")
string(REPLACE "." "\\." so "${SONAME}")
set(so_files
  "${lib}/libtroupe\\.so\\.${so}" "${lib}/libtroupe\\.so\\.${so}\\.[0-9]+"
  "${lib}/libtroupe_testing\\.so\\.${so}" "${lib}/libtroupe_testing\\.so\\.${so}\\.[0-9]+")
set(blas_files "${lib}/libtroupe_blas\\.so\\.${so}" "${lib}/libtroupe_blas\\.so\\.${so}\\.[0-9]+")
set(link_files "${lib}/libtroupe\\.a" "${lib}/libtroupe_blas\\.a" "${lib}/libtroupe_testing\\.a")
if(SHARED)
  set(link_files "${lib}/libtroupe\\.so" "${lib}/libtroupe_blas\\.so"
    "${lib}/libtroupe_testing\\.so")
endif()
set(dev_files ${link_files}
  "${lib}/cmake/troupe/FindCAF\\.cmake" "${lib}/cmake/troupe/troupeConfig\\.cmake"
  "${lib}/cmake/troupe/troupeConfigVersion\\.cmake" "${lib}/cmake/troupe/troupeTargets\\.cmake"
  "${lib}/cmake/troupe/troupeTargets-[a-z]+\\.cmake" "${lib}/pkgconfig/troupe\\.pc"
  "${lib}/pkgconfig/troupe_blas\\.pc")
files_of("${SOURCE_DIR}/include" headers)
list(TRANSFORM headers PREPEND "include/")
string(REPLACE "." "\\." headers "${headers}")
list(APPEND dev_files ${headers})
set(tools_files "bin/troupe-flight" "bin/troupe-worker")

# The files that Debian wants in each package.
function(with_debian_files name result)
  set(files "${ARGN}")
  list(TRANSFORM files PREPEND "usr/")
  list(APPEND files "usr/share/doc/${name}/copyright" "usr/share/doc/${name}/changelog\\.Debian\\.gz")
  set(${result} "${files}" PARENT_SCOPE)
endfunction()

run_cpack(TGZ)
file(GLOB archive "${WORK}/*.tar.gz")
file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${WORK}/archive")
file(GLOB top "${WORK}/archive/*")
files_of("${top}" files)
set(expected ${dev_files} ${tools_files})
if(SHARED)
  list(APPEND expected ${so_files} ${blas_files})
endif()
expect_files("the archive" "${files}" ${expected})
# Its programs find the shared library beside them.
execute_process(COMMAND "${CMAKE_COMMAND}" -E env "LD_LIBRARY_PATH=${CAF_LIBRARY_DIR}"
    "${top}/bin/troupe-worker" --help
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE result)
if(result)
  message(SEND_ERROR "troupe-worker of the archive does not start:\n${output}")
endif()

if(NOT DPKG_DEB)
  return()
endif()
run_cpack(DEB)
set(runtime "libtroupe${SONAME}")
set(names libtroupe-dev troupe-tools)
unpack_deb(libtroupe-dev files)
with_debian_files(libtroupe-dev expected ${dev_files})
expect_files(libtroupe-dev "${files}" ${expected})
expect_depends(libtroupe-dev libcaf-dev)
unpack_deb(troupe-tools files)
with_debian_files(troupe-tools expected ${tools_files}
  "share/man/man1/troupe-flight\\.1\\.gz" "share/man/man1/troupe-worker\\.1\\.gz")
expect_files(troupe-tools "${files}" ${expected})
expect_depends(troupe-tools libc6)
if(SHARED)
  list(APPEND names "${runtime}")
  unpack_deb("${runtime}" files)
  with_debian_files("${runtime}" expected ${so_files})
  expect_files("${runtime}" "${files}" ${expected})
  expect_depends("${runtime}" libc6 "libspdlog[^ ,]*")
  set(blas "libtroupe-blas${SONAME}")
  list(APPEND names "${blas}")
  unpack_deb("${blas}" files)
  with_debian_files("${blas}" expected ${blas_files})
  expect_files("${blas}" "${files}" ${expected})
  expect_depends("${blas}" libc6 "${runtime} \\(= [^)]*\\)")
  expect_depends(libtroupe-dev "${blas} \\(= [^)]*\\)")
  foreach(name libtroupe-dev troupe-tools)
    expect_depends(${name} "${runtime} \\(= [^)]*\\)")
  endforeach()
else()
  expect_depends(libtroupe-dev libspdlog-dev)
endif()
file(GLOB debs RELATIVE "${WORK}" "${WORK}/*.deb")
list(LENGTH debs count)
list(LENGTH names expected)
if(NOT count EQUAL expected)
  message(SEND_ERROR "cpack should make the packages ${names}, but made: ${debs}")
endif()
