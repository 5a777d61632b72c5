# What cpack makes: one archive, and with the generator DEB the packages libtroupe<soversion> and
# libtroupe-blas<soversion> (only of shared libraries), libtroupe-dev and troupe-tools. The presets deb and archive build for it.

set(troupe_dev_package "libtroupe-dev")
set(troupe_tools_package "troupe-tools")
set(troupe_runtime_package "libtroupe${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}")
set(troupe_blas_package "libtroupe-blas${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}")

set(CPACK_PACKAGE_NAME troupe)
set(CPACK_PACKAGE_VENDOR "The troupe authors")
if(NOT CPACK_PACKAGE_CONTACT)
  set(CPACK_PACKAGE_CONTACT "The troupe authors <authors@troupe.invalid>")
endif()
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "supervised multi-GPU CUDA work on the C++ Actor Framework")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_PACKAGE_DIRECTORY "${PROJECT_BINARY_DIR}/packages")
set(CPACK_PACKAGE_CHECKSUM SHA256)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_STRIP_FILES ON)
if(NOT CPACK_GENERATOR)
  set(CPACK_GENERATOR TGZ)
endif()
set(CPACK_SOURCE_GENERATOR TGZ)
set(CPACK_SOURCE_IGNORE_FILES "/\\.git/" "/build" "/\\.cache/" "/\\.device/")

set(CPACK_COMPONENTS_ALL troupe_dev troupe_tools)
if(NOT troupe_static)
  list(APPEND CPACK_COMPONENTS_ALL troupe_runtime troupe_blas)
endif()

# The archive's name tells for which system and with which CAF it was built, and whether with CUDA.
set(CPACK_ARCHIVE_COMPONENT_INSTALL OFF)
set(troupe_archive_cuda "")
if(TROUPE_HAS_CUDA)
  set(troupe_archive_cuda "-cuda${CUDAToolkit_VERSION_MAJOR}")
endif()
string(CONCAT CPACK_PACKAGE_FILE_NAME "troupe-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-"
  "${CMAKE_SYSTEM_PROCESSOR}-caf${CAF_LINE}${troupe_archive_cuda}")

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
if(NOT CPACK_DEBIAN_PACKAGE_RELEASE)
  set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
endif()
set(CPACK_DEBIAN_PACKAGE_SOURCE troupe)
set(troupe_deb_version "${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE}")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

# The dependencies of programs and libraries come from the libraries that they link.
foreach(component TROUPE_RUNTIME TROUPE_BLAS TROUPE_TOOLS)
  set(CPACK_DEBIAN_${component}_PACKAGE_SHLIBDEPS ON)
endforeach()
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${PROJECT_BINARY_DIR}/src")
set(needs_runtime "")
if(NOT troupe_static)
  set(needs_runtime "${troupe_runtime_package} (= ${troupe_deb_version})")
  set(needs_blas "${troupe_blas_package} (= ${troupe_deb_version})")
endif()

set(CPACK_DEBIAN_TROUPE_RUNTIME_PACKAGE_NAME "${troupe_runtime_package}")
set(CPACK_DEBIAN_TROUPE_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_TROUPE_RUNTIME_PACKAGE_CONTROL_EXTRA
  "${PROJECT_SOURCE_DIR}/packaging/debian/triggers")
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
string(CONCAT CPACK_COMPONENT_TROUPE_RUNTIME_DESCRIPTION
  "troupe runs the GPUs of one or several hosts for one C++ program. Each GPU\n"
  "is an actor, a collective over all GPUs is one request, and each request\n"
  "gets one answer, also if a GPU or a process fails. Without GPUs it runs on\n"
  "virtual devices.\n\n"
  "This package has the shared libraries.")

set(CPACK_DEBIAN_TROUPE_BLAS_PACKAGE_NAME "${troupe_blas_package}")
set(CPACK_DEBIAN_TROUPE_BLAS_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_TROUPE_BLAS_PACKAGE_DEPENDS "${needs_runtime}")
set(CPACK_DEBIAN_TROUPE_BLAS_PACKAGE_CONTROL_EXTRA
  "${PROJECT_SOURCE_DIR}/packaging/debian/triggers")
string(CONCAT CPACK_COMPONENT_TROUPE_BLAS_DESCRIPTION
  "troupe runs the GPUs of one or several hosts for one C++ program.\n\n"
  "This package has the shared library of matrix products, which are requests\n"
  "like all others.")

set(CPACK_DEBIAN_TROUPE_DEV_PACKAGE_NAME "${troupe_dev_package}")
set(CPACK_DEBIAN_TROUPE_DEV_PACKAGE_SECTION libdevel)
set(needs_dev "libcaf-dev (>= ${CAF_VERSION})")
if(troupe_static)
  list(APPEND needs_dev libspdlog-dev)
  if(TROUPE_HAS_HOSTS)
    list(APPEND needs_dev libssl-dev)
  endif()
  if(TROUPE_HAS_BLAS)
    list(APPEND needs_dev "libopenblas-dev | libblas-dev")
  endif()
endif()
list(JOIN needs_dev ", " needs_dev)
set(CPACK_DEBIAN_TROUPE_DEV_PACKAGE_DEPENDS "${needs_dev}")
if(needs_runtime)
  set(CPACK_DEBIAN_TROUPE_DEV_PACKAGE_DEPENDS "${needs_runtime}, ${needs_blas}, ${needs_dev}")
endif()
string(CONCAT CPACK_COMPONENT_TROUPE_DEV_DESCRIPTION
  "troupe runs the GPUs of one or several hosts for one C++ program.\n\n"
  "This package has the headers, and what CMake and pkg-config need to build\n"
  "programs with the library.")

set(CPACK_DEBIAN_TROUPE_TOOLS_PACKAGE_NAME "${troupe_tools_package}")
set(CPACK_DEBIAN_TROUPE_TOOLS_PACKAGE_SECTION utils)
set(CPACK_DEBIAN_TROUPE_TOOLS_PACKAGE_DEPENDS "${needs_runtime}")
string(CONCAT CPACK_COMPONENT_TROUPE_TOOLS_DESCRIPTION
  "troupe runs the GPUs of one or several hosts for one C++ program.\n\n"
  "This package has troupe-flight, which reads the records of the last\n"
  "operations of each device, and troupe-worker, the process that holds devices\n"
  "for another program.")

# The license, the changelog and the manual pages, in the form that Debian wants. Only cpack installs
# them, since it asks for each component by its name.
file(READ "${PROJECT_SOURCE_DIR}/LICENSE" license)
string(REGEX REPLACE "\n+$" "" license "${license}")
string(REGEX REPLACE "\n\n" "\n.\n" license "${license}")
string(REGEX REPLACE "\n" "\n " license "${license}")
string(TIMESTAMP now "%a, %d %b %Y %H:%M:%S +0000" UTC)
set(debian_dir "${PROJECT_BINARY_DIR}/debian")
configure_file("${PROJECT_SOURCE_DIR}/packaging/debian/copyright.in" "${debian_dir}/copyright" @ONLY)
set(debian_docs "${debian_dir}/copyright")
find_program(TROUPE_GZIP gzip DOC "compresses the changelog and manual pages of Debian packages")
mark_as_advanced(TROUPE_GZIP)
if(TROUPE_GZIP)
  configure_file("${PROJECT_SOURCE_DIR}/packaging/debian/changelog.in"
    "${debian_dir}/changelog.Debian" @ONLY)
  foreach(program troupe-flight troupe-worker)
    configure_file("${PROJECT_SOURCE_DIR}/packaging/debian/${program}.1"
      "${debian_dir}/${program}.1" COPYONLY)
  endforeach()
  execute_process(COMMAND "${TROUPE_GZIP}" -9nkf changelog.Debian troupe-flight.1 troupe-worker.1
    WORKING_DIRECTORY "${debian_dir}" COMMAND_ERROR_IS_FATAL ANY)
  list(APPEND debian_docs "${debian_dir}/changelog.Debian.gz")
  install(FILES "${debian_dir}/troupe-flight.1.gz" "${debian_dir}/troupe-worker.1.gz"
    DESTINATION "${CMAKE_INSTALL_MANDIR}/man1" COMPONENT troupe_tools EXCLUDE_FROM_ALL)
endif()
foreach(part IN LISTS CPACK_COMPONENTS_ALL)
  install(FILES ${debian_docs} DESTINATION "${CMAKE_INSTALL_DATAROOTDIR}/doc/${${part}_package}"
    COMPONENT ${part} EXCLUDE_FROM_ALL)
endforeach()

include(CPack)
