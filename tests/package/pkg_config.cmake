# Compiles SOURCE to PROGRAM with the flags that pkg-config returns for troupe, and runs it. A
# static library must link with `--static` and without it.

cmake_minimum_required(VERSION 3.25)

set(ENV{PKG_CONFIG_PATH} "${PKG_CONFIG_DIR}:$ENV{PKG_CONFIG_PATH}")
set(ENV{LD_LIBRARY_PATH} "${LIBRARY_DIRS}:$ENV{LD_LIBRARY_PATH}")
separate_arguments(cxxflags UNIX_COMMAND "${CXXFLAGS}")

function(build_and_run)
  execute_process(
    COMMAND "${PKG_CONFIG}" ${ARGN} --cflags --libs troupe
    OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  if(flags MATCHES "cudart|nccl")
    message(FATAL_ERROR "linking needs CUDA or NCCL: ${flags}")
  endif()
  separate_arguments(flags UNIX_COMMAND "${flags}")
  execute_process(
    COMMAND "${CXX}" -std=c++20 ${cxxflags} "${SOURCE}" -o "${PROGRAM}" ${flags}
    COMMAND_ECHO STDOUT
    COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${PROGRAM}" COMMAND_ERROR_IS_FATAL ANY)
endfunction()

build_and_run()
if(STATIC)
  build_and_run(--static)
endif()
