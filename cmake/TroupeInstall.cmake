# Install rules, the package's configuration for the install tree and for the build tree, and the
# files for pkg-config. The components: troupe_runtime (shared libraries), troupe_blas (that of products),
# troupe_dev (what compiling and linking needs) and troupe_tools (programs).

include(CMakePackageConfigHelpers)

set(troupe_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/troupe")
set(troupe_build_package_dir "${PROJECT_BINARY_DIR}/${troupe_package_dir}")

install(TARGETS troupe troupe_testing
  EXPORT troupeTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT troupe_dev
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT troupe_runtime
    NAMELINK_COMPONENT troupe_dev
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT troupe_runtime
  FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT troupe_dev)

install(TARGETS troupe_blas
  EXPORT troupeTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT troupe_dev
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT troupe_blas
    NAMELINK_COMPONENT troupe_dev
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT troupe_blas
  FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT troupe_dev)

# Not in the header set, whose headers are compiled each: they need headers that are not ours.
install(FILES
  "${PROJECT_SOURCE_DIR}/include/troupe/cuda_error.hpp"
  "${PROJECT_SOURCE_DIR}/include/troupe/cuda_resource.hpp"
  "${PROJECT_SOURCE_DIR}/include/troupe/dlpack.hpp"
  "${PROJECT_SOURCE_DIR}/include/troupe/rmm.hpp"
  "${PROJECT_SOURCE_DIR}/include/troupe/stdexec.hpp"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/troupe" COMPONENT troupe_dev)
install(FILES "${PROJECT_SOURCE_DIR}/include/troupe/detail/device_resource.hpp"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/troupe/detail" COMPONENT troupe_dev)

install(EXPORT troupeTargets NAMESPACE troupe:: DESTINATION "${troupe_package_dir}"
  COMPONENT troupe_dev)
export(EXPORT troupeTargets NAMESPACE troupe::
  FILE "${troupe_build_package_dir}/troupeTargets.cmake")

# The facts about this build in the package's configuration.
get_target_property(troupe_type troupe TYPE)
set(troupe_static FALSE)
if(troupe_type STREQUAL "STATIC_LIBRARY")
  set(troupe_static TRUE)
endif()
set(troupe_static_blas FALSE)
if(troupe_static AND TROUPE_HAS_BLAS)
  set(troupe_static_blas TRUE)
endif()
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/troupeConfig.cmake.in"
  "${troupe_build_package_dir}/troupeConfig.cmake"
  INSTALL_DESTINATION "${troupe_package_dir}"
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(
  "${troupe_build_package_dir}/troupeConfigVersion.cmake"
  VERSION ${PROJECT_VERSION}
  COMPATIBILITY SameMinorVersion) # until 1.0
configure_file("${PROJECT_SOURCE_DIR}/cmake/FindCAF.cmake"
               "${troupe_build_package_dir}/FindCAF.cmake" COPYONLY)
install(FILES
  "${troupe_build_package_dir}/troupeConfig.cmake"
  "${troupe_build_package_dir}/troupeConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/FindCAF.cmake"
  DESTINATION "${troupe_package_dir}" COMPONENT troupe_dev)

# troupe.pc and troupe_blas.pc: Libs has the libraries that users of the headers need. A shared
# library brings those that only it needs. A static one does not link without them, with or without
# `pkg-config --static`.
set(troupe_pc_private "")
set(troupe_blas_pc_private "")
if(troupe_static_blas)
  list(JOIN BLAS_LIBRARIES " " troupe_blas_pc_private)
endif()
set(troupe_pc_requires "")
if(troupe_static)
  if(TROUPE_HAS_CUDA)
    list(TRANSFORM CMAKE_DL_LIBS PREPEND "-l" OUTPUT_VARIABLE troupe_pc_private)
  endif()
  set(troupe_pc_requires "spdlog")
  if(TROUPE_HAS_HOSTS)
    string(APPEND troupe_pc_requires ", openssl")
  endif()
endif()
# The relative path from the folder of these files to the prefix.
set(troupe_pc_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig")
cmake_path(NORMAL_PATH troupe_pc_prefix)
cmake_path(RELATIVE_PATH troupe_pc_prefix BASE_DIRECTORY "/" OUTPUT_VARIABLE troupe_pc_prefix)
string(REGEX REPLACE "[^/]+" ".." troupe_pc_prefix "${troupe_pc_prefix}")
foreach(library troupe troupe_blas)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/${library}.pc.in"
                 "${PROJECT_BINARY_DIR}/${library}.pc.in" @ONLY)
  file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/pkgconfig/$<CONFIG>/${library}.pc"
       INPUT "${PROJECT_BINARY_DIR}/${library}.pc.in" TARGET ${library})
  install(FILES "${PROJECT_BINARY_DIR}/pkgconfig/$<CONFIG>/${library}.pc"
    DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT troupe_dev)
endforeach()

if(PROJECT_IS_TOP_LEVEL)
  include(TroupePackages)
endif()
