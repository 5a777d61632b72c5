# Device code that the library loads at run time.
#
#   troupe_embed_kernels(<target> <file>.cu)
#       Compiles the device code of <file>.cu to a fatbin for CMAKE_CUDA_ARCHITECTURES, and adds it
#       to the target as `extern "C" const unsigned char troupe_<file>_image[]`. The file has no host
#       code, so the target and its users link without CUDA.

# nvcc's options for one entry of CMAKE_CUDA_ARCHITECTURES.
function(_troupe_architecture_options architecture result)
  if(architecture MATCHES "^(native|all|all-major)$")
    set(options "-arch=${architecture}")
  elseif(architecture MATCHES "^([0-9]+[a-z]?)-real$")
    set(options -gencode "arch=compute_${CMAKE_MATCH_1},code=sm_${CMAKE_MATCH_1}")
  elseif(architecture MATCHES "^([0-9]+[a-z]?)-virtual$")
    set(options -gencode "arch=compute_${CMAKE_MATCH_1},code=compute_${CMAKE_MATCH_1}")
  elseif(architecture MATCHES "^([0-9]+[a-z]?)$")
    set(options -gencode
      "arch=compute_${architecture},code=[compute_${architecture},sm_${architecture}]")
  else()
    message(FATAL_ERROR "troupe: CMAKE_CUDA_ARCHITECTURES has ${architecture}, not a number, "
                        "<number>-real, <number>-virtual, native, all or all-major")
  endif()
  set(${result} ${options} PARENT_SCOPE)
endfunction()

function(troupe_embed_kernels target file)
  cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" OUTPUT_VARIABLE source)
  cmake_path(GET source STEM name)
  set(fatbin "${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin")
  set(array "${CMAKE_CURRENT_BINARY_DIR}/${name}_image.cpp")
  set(options -std=c++20)
  foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
    _troupe_architecture_options("${architecture}" some)
    list(APPEND options ${some})
  endforeach()
  if(CMAKE_CUDA_HOST_COMPILER)
    list(APPEND options -ccbin "${CMAKE_CUDA_HOST_COMPILER}")
  endif()
  if(CMAKE_COMPILE_WARNING_AS_ERROR)
    list(APPEND options -Werror all-warnings)
  endif()
  separate_arguments(flags NATIVE_COMMAND "${CMAKE_CUDA_FLAGS}")
  add_custom_command(OUTPUT "${fatbin}"
    COMMAND "${CMAKE_CUDA_COMPILER}" -fatbin ${options} ${flags} "-I${PROJECT_SOURCE_DIR}/src"
      -MD -MF "${fatbin}.d" -o "${fatbin}" "${source}"
    MAIN_DEPENDENCY "${source}" DEPFILE "${fatbin}.d"
    COMMENT "Compiling the device code of ${name}.cu" VERBATIM)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/kernel_image.cpp.in" "${array}" @ONLY)
  set_source_files_properties("${array}" PROPERTIES
    OBJECT_DEPENDS "${fatbin}" SKIP_UNITY_BUILD_INCLUSION ON)
  target_sources(${target} PRIVATE "${array}" "${fatbin}")
endfunction()
