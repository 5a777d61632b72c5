# Compiles main.cpp and product.cpp of SOURCES to programs in the folder PROGRAMS, with the flags
# that pkg-config returns for the libraries that they use, and runs them. A static library must link
# with `--static` and without it.

cmake_minimum_required(VERSION 3.25)

set(ENV{PKG_CONFIG_PATH} "${PKG_CONFIG_DIR}:$ENV{PKG_CONFIG_PATH}")
set(ENV{LD_LIBRARY_PATH} "${LIBRARY_DIRS}:$ENV{LD_LIBRARY_PATH}")
separate_arguments(cxxflags UNIX_COMMAND "${CXXFLAGS}")

file(MAKE_DIRECTORY "${PROGRAMS}")

# build_and_run(<program> <library> [<option of pkg-config>...])
function(build_and_run program library)
  execute_process(
    COMMAND "${PKG_CONFIG}" ${ARGN} --cflags --libs ${library}
    OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  if(flags MATCHES "cudart|nccl")
    message(FATAL_ERROR "linking needs CUDA or NCCL: ${flags}")
  endif()
  separate_arguments(flags UNIX_COMMAND "${flags}")
  execute_process(
    COMMAND "${CXX}" -std=c++20 ${cxxflags} "${SOURCES}/${program}.cpp" -o "${PROGRAMS}/${program}"
            ${flags}
    COMMAND_ECHO STDOUT
    COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${PROGRAMS}/${program}" COMMAND_ERROR_IS_FATAL ANY)
endfunction()

build_and_run(main troupe)
build_and_run(product troupe_blas)
if(STATIC)
  build_and_run(main troupe --static)
  build_and_run(product troupe_blas --static)
endif()
