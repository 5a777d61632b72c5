# Compiles SOURCE to PROGRAM with what pkg-config says about troupe, and runs it.

cmake_minimum_required(VERSION 3.25)

set(static "")
if(STATIC)
  set(static --static)
endif()
set(ENV{PKG_CONFIG_PATH} "${PKG_CONFIG_DIR}:$ENV{PKG_CONFIG_PATH}")
execute_process(
  COMMAND "${PKG_CONFIG}" ${static} --cflags --libs troupe
  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
separate_arguments(cxxflags UNIX_COMMAND "${CXXFLAGS}")

execute_process(
  COMMAND "${CXX}" -std=c++20 ${cxxflags} "${SOURCE}" -o "${PROGRAM}" ${flags}
  COMMAND_ECHO STDOUT
  COMMAND_ERROR_IS_FATAL ANY)

set(ENV{LD_LIBRARY_PATH} "${LIBRARY_DIRS}:$ENV{LD_LIBRARY_PATH}")
execute_process(COMMAND "${PROGRAM}" COMMAND_ERROR_IS_FATAL ANY)
