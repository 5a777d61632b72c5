# The programs of docs/interop.md, which need other libraries. They run as tests, on virtual devices.

function(add_interop_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "EXPECT" "LIBS;INCLUDES")
  set(target "snippets_${name}")
  troupe_add_program(${target} SOURCES "${PROJECT_SOURCE_DIR}/docs/snippets/${name}.cpp"
    LIBS ${arg_LIBS})
  target_include_directories(${target} SYSTEM PRIVATE ${arg_INCLUDES})
  if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread" AND CAF_LINE STREQUAL "0.17")
    target_sources(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests/support/tsan_caf.cpp")
    target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})
  endif()
  if(TROUPE_BUILD_TESTS)
    add_test(NAME Guide.${name} COMMAND ${target} --troupe.backend=host)
    math(EXPR timeout "120 * ${TROUPE_TEST_TIMEOUT_FACTOR}")
    set_tests_properties(Guide.${name} PROPERTIES LABELS actors TIMEOUT ${timeout}
      PASS_REGULAR_EXPRESSION "${arg_EXPECT}")
  endif()
endfunction()

find_path(TROUPE_DLPACK_INCLUDE dlpack/dlpack.h DOC "folder with dlpack/dlpack.h, for its tests")
mark_as_advanced(TROUPE_DLPACK_INCLUDE)
if(TROUPE_DLPACK_INCLUDE)
  add_interop_program(tensors INCLUDES "${TROUPE_DLPACK_INCLUDE}" EXPECT "(^|\n)0 wrong elements")
endif()

if(TROUPE_HAS_CUDA)
  find_path(TROUPE_LIBCUDACXX_INCLUDE cuda/memory_resource HINTS ${CUDAToolkit_INCLUDE_DIRS}
    PATH_SUFFIXES cccl DOC "folder of libcu++, for its tests")
  mark_as_advanced(TROUPE_LIBCUDACXX_INCLUDE)
  if(TROUPE_LIBCUDACXX_INCLUDE)
    add_interop_program(memory_resource LIBS CUDA::cudart INCLUDES "${TROUPE_LIBCUDACXX_INCLUDE}"
      EXPECT "1048576 bytes of the device")
  endif()
endif()

# With -DTROUPE_TORCH_ROOT=FOLDER: the folder of libtorch, or torch/ of its Python wheel. Not by
# find_package(Torch), which also looks for all of the CUDA that libtorch was built with. For tensors
# on GPUs, libtorch_cuda and all that it needs have to be there, too: -DTROUPE_TORCH_CUDA=ON.
set(TROUPE_TORCH_ROOT "" CACHE PATH "folder of libtorch, for the program with its tensors")
option(TROUPE_TORCH_CUDA "Link the program with libtorch_cuda" OFF)
if(TROUPE_TORCH_ROOT)
  set(torch_libs "")
  foreach(lib torch_cpu c10)
    find_library(TROUPE_LIB_${lib} ${lib} PATHS "${TROUPE_TORCH_ROOT}/lib" NO_DEFAULT_PATH REQUIRED)
    mark_as_advanced(TROUPE_LIB_${lib})
    list(APPEND torch_libs "${TROUPE_LIB_${lib}}")
  endforeach()
  if(TROUPE_TORCH_CUDA)
    find_library(TROUPE_LIB_torch_cuda torch_cuda PATHS "${TROUPE_TORCH_ROOT}/lib" NO_DEFAULT_PATH
      REQUIRED)
    mark_as_advanced(TROUPE_LIB_torch_cuda)
    # No name of it is used here: it registers itself when it is loaded.
    list(APPEND torch_libs "-Wl,--no-as-needed" "${TROUPE_LIB_torch_cuda}")
  endif()
  add_interop_program(torch_tensors LIBS ${torch_libs}
    INCLUDES "${TROUPE_TORCH_ROOT}/include" "${TROUPE_TORCH_ROOT}/include/torch/csrc/api/include"
    EXPECT "8 ranks: 0 wrong elements in the tensors, 0 in the library's memory")
endif()

# With -DTROUPE_RMM_ROOT="FOLDER;FOLDER": the folders of RMM and rapids_logger, as in their Python
# wheels. RMM's own CMake package needs a newer CMake than this project.
set(TROUPE_RMM_ROOT "" CACHE STRING "folders of RMM and rapids_logger, for the tests with RMM")
if(TROUPE_HAS_CUDA AND TROUPE_RMM_ROOT)
  add_library(troupe_rmm INTERFACE)
  foreach(lib rmm rapids_logger)
    find_library(TROUPE_LIB_${lib} ${lib} PATHS ${TROUPE_RMM_ROOT} PATH_SUFFIXES lib64 lib
      NO_DEFAULT_PATH REQUIRED)
    mark_as_advanced(TROUPE_LIB_${lib})
    target_link_libraries(troupe_rmm INTERFACE "${TROUPE_LIB_${lib}}")
  endforeach()
  target_link_libraries(troupe_rmm INTERFACE CUDA::cudart)
  # RMM brings the libcu++ that it needs.
  foreach(folder IN LISTS TROUPE_RMM_ROOT)
    target_include_directories(troupe_rmm SYSTEM BEFORE INTERFACE "${folder}/include"
      "${folder}/include/rapids")
  endforeach()
  target_compile_definitions(troupe_rmm INTERFACE LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE)
  add_interop_program(rmm_containers LIBS troupe_rmm
    EXPECT "RMM's containers need GPUs|(^|\n)0 wrong elements")
endif()
