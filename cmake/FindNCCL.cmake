# Finds NCCL, NVIDIA's collective communication library.
#
# A config package is tried first, then nccl.h with libnccl.so, or libnccl.so.2 alone, in this order:
# NCCL_ROOT, CMAKE_PREFIX_PATH and the system's folders; the CUDA toolkit; the folder of the wheel
# `nvidia-nccl` that the first python3 on the path sees.
#
# Target:    NCCL::nccl
# Variables: NCCL_FOUND, NCCL_VERSION (of the header: the library that is loaded at run time may be
#            another 2.x), NCCL_INCLUDE_DIR, NCCL_LIBRARY

find_package(NCCL ${NCCL_FIND_VERSION} QUIET CONFIG)
if(NCCL_FOUND AND TARGET NCCL::nccl)
  include(FindPackageHandleStandardArgs)
  find_package_handle_standard_args(NCCL CONFIG_MODE)
  return()
endif()
unset(NCCL_FOUND)
unset(NCCL_VERSION)

set(_nccl_names nccl libnccl.so.2)
set(_nccl_include_hints ${CUDAToolkit_INCLUDE_DIRS})
set(_nccl_library_hints ${CUDAToolkit_LIBRARY_DIR})

find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${_nccl_include_hints} DOC "Folder with nccl.h")
find_library(NCCL_LIBRARY NAMES ${_nccl_names} HINTS ${_nccl_library_hints} DOC "NCCL library")

if(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
  find_program(NCCL_PYTHON python3 DOC "Python that may have NCCL's wheel")
  mark_as_advanced(NCCL_PYTHON)
  if(NCCL_PYTHON)
    execute_process(
      COMMAND "${NCCL_PYTHON}" -c "import nvidia.nccl as n; print(list(n.__path__)[0])"
      OUTPUT_VARIABLE _nccl_wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(_nccl_wheel)
    # Both from the wheel: a header and a library of different versions do not fit together.
    find_path(_nccl_wheel_include nccl.h PATHS "${_nccl_wheel}/include" NO_DEFAULT_PATH NO_CACHE)
    find_library(_nccl_wheel_library NAMES ${_nccl_names}
                 PATHS "${_nccl_wheel}/lib" NO_DEFAULT_PATH NO_CACHE)
    if(_nccl_wheel_include AND _nccl_wheel_library)
      set(NCCL_INCLUDE_DIR "${_nccl_wheel_include}" CACHE PATH "Folder with nccl.h" FORCE)
      set(NCCL_LIBRARY "${_nccl_wheel_library}" CACHE FILEPATH "NCCL library" FORCE)
    endif()
    unset(_nccl_wheel_include)
    unset(_nccl_wheel_library)
  endif()
  unset(_nccl_wheel)
endif()
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

if(NCCL_INCLUDE_DIR)
  file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" _nccl_lines
       REGEX "^#define[ \t]+NCCL_(MAJOR|MINOR|PATCH)[ \t]+[0-9]+")
  foreach(_nccl_part MAJOR MINOR PATCH)
    if(_nccl_lines MATCHES "NCCL_${_nccl_part}[ \t]+([0-9]+)")
      list(APPEND NCCL_VERSION ${CMAKE_MATCH_1})
    endif()
  endforeach()
  list(JOIN NCCL_VERSION "." NCCL_VERSION)
  unset(_nccl_lines)
  unset(_nccl_part)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL
  REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR
  VERSION_VAR NCCL_VERSION)

if(NCCL_FOUND AND NOT TARGET NCCL::nccl)
  add_library(NCCL::nccl UNKNOWN IMPORTED)
  set_target_properties(NCCL::nccl PROPERTIES
    IMPORTED_LOCATION "${NCCL_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}")
endif()

unset(_nccl_include_hints)
unset(_nccl_library_hints)
unset(_nccl_names)
