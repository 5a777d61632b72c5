# Runs PROGRAM with ARGUMENTS in a file system that contains only PROGRAM and its libraries. Checks
# that it exits with RESULT and that its output matches EXPECTED. Prints "skipped" if the system
# does not allow a user namespace with a root directory of its own.

cmake_minimum_required(VERSION 3.25)

execute_process(COMMAND unshare --map-root-user true RESULT_VARIABLE refused ERROR_VARIABLE why)
if(NOT refused EQUAL 0)
  message("skipped: unshare --map-root-user: ${refused} ${why}")
  return()
endif()

file(REMOVE_RECURSE "${ROOT}")
file(COPY "${PROGRAM}" DESTINATION "${ROOT}")
execute_process(COMMAND ldd "${PROGRAM}" OUTPUT_VARIABLE libraries COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "/[^ \n]+" libraries "${libraries}")
foreach(library IN LISTS libraries)
  cmake_path(GET library PARENT_PATH folder)
  if(library MATCHES "/ld-linux[^/]*$") # programs contain the path of the loader
    file(COPY "${library}" DESTINATION "${ROOT}${folder}" FOLLOW_SYMLINK_CHAIN)
  endif()
  file(COPY "${library}" DESTINATION "${ROOT}/libraries" FOLLOW_SYMLINK_CHAIN)
endforeach()

cmake_path(GET PROGRAM FILENAME name)
execute_process(
  COMMAND "${CMAKE_COMMAND}" -E env LD_LIBRARY_PATH=/libraries
    unshare --map-root-user chroot "${ROOT}" "/${name}" ${ARGUMENTS}
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
message("${output}")
if(NOT result EQUAL RESULT)
  message(FATAL_ERROR "it ended with ${result}, not with ${RESULT}")
endif()
if(NOT output MATCHES "${EXPECTED}")
  message(FATAL_ERROR "its output does not match ${EXPECTED}")
endif()
