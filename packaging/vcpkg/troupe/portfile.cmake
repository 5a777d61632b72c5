# Builds the sources that this port is part of. vcpkg does not see when they change: remove the
# package, and use --no-binarycaching.
cmake_path(SET SOURCE_PATH NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../../..")

vcpkg_check_features(OUT_FEATURE_OPTIONS FEATURE_OPTIONS FEATURES
  cuda TROUPE_WITH_CUDA
  hosts TROUPE_HOSTS
  tools TROUPE_BUILD_TOOLS)

vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    ${FEATURE_OPTIONS}
    -DTROUPE_BUILD_TESTS=OFF
    -DTROUPE_BUILD_EXAMPLES=OFF
    -DTROUPE_BUILD_BENCH=OFF
    -DTROUPE_BUILD_DOCS=OFF
    -DTROUPE_UNITY=ON)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/troupe)
vcpkg_fixup_pkgconfig()
if("tools" IN_LIST FEATURES)
  vcpkg_copy_tools(TOOL_NAMES troupe-flight troupe-worker AUTO_CLEAN)
endif()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
