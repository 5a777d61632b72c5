# Fails unless PROGRAM --help succeeds and prints only the options, and no computed results.

cmake_minimum_required(VERSION 3.25)

execute_process(
  COMMAND "${PROGRAM}" --troupe.backend=host --help
  OUTPUT_VARIABLE printed
  ERROR_VARIABLE errors
  COMMAND_ERROR_IS_FATAL ANY)
string(FIND "${printed}" "--long-help" options)
string(FIND "${printed}" "elements" computed)
if(options EQUAL -1 OR NOT computed EQUAL -1 OR NOT errors STREQUAL "")
  message(FATAL_ERROR "${PROGRAM} --help printed:\n${printed}${errors}")
endif()
