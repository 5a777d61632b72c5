# Finds CAF, the C++ Actor Framework, in either of the two forms in which it is distributed:
#
# - CAF 1.0 or newer (vcpkg, Conan, an installation from source) brings a CMake config package;
# - CAF 0.17 (Debian and Ubuntu, libcaf-dev) brings headers and libraries only.
#
# The first form is tried first. `find_package(CAF 1.0)` accepts only the first,
# `find_package(CAF 0.17.6)` only the second: programs of the two cannot be linked together.
#
# Components: core, io (both, when none is named).
# Targets:    CAF::core, CAF::io
# Variables:  CAF_FOUND, CAF_VERSION, and CAF_LINE: the line that two compatible builds share,
#             "0.17", "1.0", "1.1", ...
# Hints:      CAF_ROOT, CAF_DIR, CMAKE_PREFIX_PATH

if(NOT CAF_FIND_COMPONENTS)
  set(CAF_FIND_COMPONENTS core io)
endif()

set(_caf_reason "")
set(_caf_config FALSE)

# A project has one CAF: the one that another part of it has found is kept.
set(_caf_try_config TRUE)
set(_caf_try_headers TRUE)
if(CAF_FIND_VERSION AND CAF_FIND_VERSION VERSION_LESS 1.0)
  set(_caf_try_config FALSE)
elseif(CAF_FIND_VERSION)
  set(_caf_try_headers FALSE)
endif()
if(TARGET CAF::core)
  get_target_property(_caf_by_headers CAF::core TROUPE_CAF_BY_HEADERS)
  if(_caf_by_headers)
    set(_caf_try_config FALSE)
  else()
    set(_caf_try_headers FALSE)
  endif()
  unset(_caf_by_headers)
  if(NOT _caf_try_config AND NOT _caf_try_headers)
    set(_caf_reason "wanted is ${CAF_FIND_VERSION}, but this project uses CAF ${CAF_VERSION} already")
    unset(CAF_VERSION)
  endif()
endif()

if(_caf_try_config)
  set(_caf_wanted 1.0)
  if(CAF_FIND_VERSION)
    set(_caf_wanted ${CAF_FIND_VERSION})
  endif()
  find_package(CAF ${_caf_wanted} QUIET CONFIG)
  if(CAF_FOUND)
    set(_caf_config TRUE)
    foreach(_caf_component IN LISTS CAF_FIND_COMPONENTS)
      if(TARGET CAF::${_caf_component})
        set(CAF_${_caf_component}_FOUND TRUE)
      endif()
    endforeach()
  endif()
  unset(_caf_wanted)
endif()

if(_caf_try_headers AND NOT _caf_config)
  unset(CAF_VERSION)
  find_package(Threads QUIET)
  find_path(CAF_INCLUDE_DIR caf/all.hpp DOC "Folder with caf/all.hpp (CAF 0.17)")
  mark_as_advanced(CAF_INCLUDE_DIR)
  if(CAF_INCLUDE_DIR)
    # 0.17 writes 1706 for 0.17.6. In 1.x this line is an octal literal and means nothing.
    file(STRINGS "${CAF_INCLUDE_DIR}/caf/config.hpp" _caf_line
         REGEX "^#define[ \t]+CAF_VERSION[ \t]+[1-9][0-9]*")
    if(_caf_line MATCHES "CAF_VERSION[ \t]+([1-9][0-9]*)")
      math(EXPR _caf_major "${CMAKE_MATCH_1} / 10000")
      math(EXPR _caf_minor "${CMAKE_MATCH_1} / 100 % 100")
      math(EXPR _caf_patch "${CMAKE_MATCH_1} % 100")
      set(CAF_VERSION ${_caf_major}.${_caf_minor}.${_caf_patch})
      unset(_caf_major)
      unset(_caf_minor)
      unset(_caf_patch)
    endif()
    unset(_caf_line)
  endif()
  if(CAF_VERSION AND NOT CAF_VERSION MATCHES "^0\\.17\\.")
    set(_caf_reason "${CAF_INCLUDE_DIR} has CAF ${CAF_VERSION}; needed is 0.17, or 1.0 and newer")
    unset(CAF_VERSION)
  endif()
  foreach(_caf_component IN LISTS CAF_FIND_COMPONENTS)
    find_library(CAF_${_caf_component}_LIBRARY caf_${_caf_component}
                 DOC "CAF library ${_caf_component} (CAF 0.17)")
    mark_as_advanced(CAF_${_caf_component}_LIBRARY)
    if(CAF_VERSION AND CAF_${_caf_component}_LIBRARY AND Threads_FOUND)
      set(CAF_${_caf_component}_FOUND TRUE)
    else()
      set(CAF_${_caf_component}_FOUND FALSE)
    endif()
  endforeach()
endif()

include(FindPackageHandleStandardArgs)
if(_caf_config)
  set(_caf_where CAF_DIR)
else()
  set(_caf_where CAF_INCLUDE_DIR)
endif()
find_package_handle_standard_args(CAF
  REQUIRED_VARS ${_caf_where} CAF_VERSION
  VERSION_VAR CAF_VERSION
  HANDLE_COMPONENTS
  REASON_FAILURE_MESSAGE "${_caf_reason}")

if(CAF_FOUND)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" CAF_LINE "${CAF_VERSION}")
  if(NOT _caf_config)
    foreach(_caf_component IN LISTS CAF_FIND_COMPONENTS)
      if(NOT TARGET CAF::${_caf_component})
        add_library(CAF::${_caf_component} UNKNOWN IMPORTED)
        set_target_properties(CAF::${_caf_component} PROPERTIES
          IMPORTED_LOCATION "${CAF_${_caf_component}_LIBRARY}"
          INTERFACE_INCLUDE_DIRECTORIES "${CAF_INCLUDE_DIR}"
          INTERFACE_LINK_LIBRARIES Threads::Threads
          TROUPE_CAF_BY_HEADERS TRUE)
        if(NOT _caf_component STREQUAL "core")
          target_link_libraries(CAF::${_caf_component} INTERFACE CAF::core)
        endif()
      endif()
    endforeach()
  endif()
endif()

unset(_caf_component)
unset(_caf_config)
unset(_caf_reason)
unset(_caf_try_config)
unset(_caf_try_headers)
unset(_caf_where)
