# Functions for the folders below to declare their targets.
#
#   troupe_target_defaults(<target>)
#       C++20, warnings, and TROUPE_HAS_CUDA=1 if the CUDA backend is built.
#
#   troupe_add_module(<folder> [USES <module>...] SOURCES <file>... [ALONE <file>...]
#                     [LIBRARY <library>])
#       A module of the library: an object library, whose objects are part of LIBRARY, by default
#       troupe. USES lists the modules whose headers its files may include (scripts/check-layers).
#       With TROUPE_UNITY, its files are compiled as one. ALONE lists those of SOURCES that have
#       names in common with others, and are always compiled by themselves.
#
#   troupe_add_program(<name> SOURCES <file>... [LIBS <library>...])
#       A program that links troupe.
#
#   troupe_add_test(<name> LABEL <label> SOURCES <file>... [LIBS <library>...] [TIMEOUT <seconds>]
#                   [ALSO_ON_GPUS] [ALSO_IN_WORKERS <filter>] [ALSO_DIRECT <filter>]
#                   [ALSO_BOTH_WAYS <filter>])
#       A GoogleTest binary with its main function. Each of its cases is a test of its own in ctest.
#       LABEL is one of unit, actors, chaos, gpu, multi_gpu, exactly one for each binary.
#       The sources may include the library's private headers, relative to src/, and those of
#       tests/support/ as "support/...".
#       ALSO_ON_GPUS lists all cases once more, as gpu/..., with the label gpu and with
#       TROUPE_TEST_BACKEND=cuda in their environment, if the CUDA backend is built.
#       ALSO_IN_WORKERS lists the cases of a GoogleTest filter once more, as worker/..., with
#       TROUPE_TEST_PLACEMENT=worker: their devices live in worker processes.
#       ALSO_DIRECT lists the cases of a filter once more, as direct/..., with
#       TROUPE_TEST_COLLECTIVES=direct: the collectives of their worlds go direct.
#       ALSO_BOTH_WAYS does so as ways/..., with TROUPE_TEST_COLLECTIVES=automatic: some go direct,
#       others by NCCL.

set(TROUPE_WARNINGS
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wextra-semi
  # {.deadline = 2s} leaves the other fields at their defaults, on purpose. Programs get this
  # warning (troupe_add_program), so all fields of the public aggregates have defaults.
  -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # CAF 0.17 reads vector elements into an uninitialized variable; g++ reports our type there.
  list(APPEND TROUPE_WARNINGS -Wno-maybe-uninitialized)
endif()

function(troupe_target_defaults target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CUDA_RUNTIME_LIBRARY Shared)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:${TROUPE_WARNINGS}>"
    # CMake 3.25 does not know C++20 of nvcc: CUDA_STANDARD cannot be used.
    "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>")
  if(TROUPE_HAS_CUDA)
    target_compile_definitions(${target} PRIVATE TROUPE_HAS_CUDA=1)
  endif()
endfunction()

function(troupe_add_module folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LIBRARY" "USES;SOURCES;ALONE")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "troupe_add_module(${folder}): unknown argument ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_LIBRARY)
    set(arg_LIBRARY troupe)
  endif()
  string(REPLACE "/" "_" name "troupe_${folder}")
  add_library(${name} OBJECT ${arg_SOURCES})
  troupe_target_defaults(${name})
  set_target_properties(${name} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    UNITY_BUILD ${TROUPE_UNITY}
    UNITY_BUILD_BATCH_SIZE 0)
  if(TROUPE_UNITY)
    # About names that files have in common; their own builds check the rest.
    target_compile_options(${name} PRIVATE -Wno-shadow -Wno-subobject-linkage)
  endif()
  foreach(file IN LISTS arg_ALONE)
    if(NOT file IN_LIST arg_SOURCES)
      message(FATAL_ERROR "troupe_add_module(${folder}): ${file} is in ALONE, but not in SOURCES")
    endif()
    set_source_files_properties(${file} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endforeach()
  target_include_directories(${name} PRIVATE
    "${PROJECT_SOURCE_DIR}/include" "${CMAKE_CURRENT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE CAF::core CAF::io Threads::Threads spdlog::spdlog)
  foreach(used IN LISTS arg_USES)
    string(REPLACE "/" "_" used "troupe_${used}")
    if(NOT TARGET ${used})
      message(FATAL_ERROR "troupe_add_module(${folder}): ${used} is not declared before it")
    endif()
  endforeach()
  target_sources(${arg_LIBRARY} PRIVATE $<TARGET_OBJECTS:${name}>)
endfunction()

function(troupe_add_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBS")
  add_executable(${name} ${arg_SOURCES})
  troupe_target_defaults(${name})
  target_link_libraries(${name} PRIVATE troupe::troupe ${arg_LIBS})
  # As in a user's program: all fields of the public aggregates have defaults.
  target_compile_options(${name} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wmissing-field-initializers>")
endfunction()

set(TROUPE_TEST_LABELS unit actors chaos gpu multi_gpu)

# The timeout of a case in seconds, by label. Sanitizers are slow: their presets multiply it.
set(TROUPE_TEST_TIMEOUT_unit 60)
set(TROUPE_TEST_TIMEOUT_actors 120)
set(TROUPE_TEST_TIMEOUT_chaos 600)
set(TROUPE_TEST_TIMEOUT_gpu 300)
set(TROUPE_TEST_TIMEOUT_multi_gpu 300)
set(TROUPE_TEST_TIMEOUT_FACTOR 1 CACHE STRING "Multiplies the time that a test may take")

function(troupe_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "ALONE;ALSO_ON_GPUS"
    "LABEL;TIMEOUT;ALSO_IN_WORKERS;ALSO_DIRECT;ALSO_BOTH_WAYS" "SOURCES;LIBS")
  if(NOT arg_LABEL IN_LIST TROUPE_TEST_LABELS)
    message(FATAL_ERROR "troupe_add_test(${name}): LABEL is '${arg_LABEL}', not one of "
                        "${TROUPE_TEST_LABELS}")
  endif()
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "troupe_add_test(${name}): what is ${arg_UNPARSED_ARGUMENTS}?")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT ${TROUPE_TEST_TIMEOUT_${arg_LABEL}})
  endif()
  math(EXPR timeout "${arg_TIMEOUT} * ${TROUPE_TEST_TIMEOUT_FACTOR}")

  add_executable(${name} ${arg_SOURCES})
  troupe_target_defaults(${name})
  target_link_libraries(${name} PRIVATE troupe_test_support ${arg_LIBS})
  # Less optimized than the library: they compile in four fifths of the time.
  target_compile_options(${name} PRIVATE
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<NOT:$<CONFIG:Debug>>>:-O1>")

  # The cases are listed when ctest runs, so that a cross build needs no GPU library.
  set(discover DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60)
  set(properties LABELS ${arg_LABEL} TIMEOUT ${timeout})
  if(arg_LABEL MATCHES "gpu")
    list(APPEND properties RESOURCE_LOCK gpus)
  endif()
  if(arg_ALONE)
    list(APPEND properties RUN_SERIAL TRUE)
  endif()
  gtest_discover_tests(${name} ${discover} PROPERTIES ${properties})
  if(arg_ALSO_IN_WORKERS)
    gtest_discover_tests(${name} ${discover} TEST_PREFIX worker/ TEST_FILTER "${arg_ALSO_IN_WORKERS}"
      PROPERTIES ${properties} ENVIRONMENT TROUPE_TEST_PLACEMENT=worker)
  endif()
  if(arg_ALSO_DIRECT)
    gtest_discover_tests(${name} ${discover} TEST_PREFIX direct/ TEST_FILTER "${arg_ALSO_DIRECT}"
      PROPERTIES ${properties} ENVIRONMENT TROUPE_TEST_COLLECTIVES=direct)
  endif()
  if(arg_ALSO_BOTH_WAYS)
    gtest_discover_tests(${name} ${discover} TEST_PREFIX ways/ TEST_FILTER "${arg_ALSO_BOTH_WAYS}"
      PROPERTIES ${properties} ENVIRONMENT TROUPE_TEST_COLLECTIVES=automatic)
  endif()
  if(arg_ALSO_ON_GPUS AND TROUPE_HAS_CUDA)
    gtest_discover_tests(${name} ${discover} TEST_PREFIX gpu/
      PROPERTIES LABELS gpu TIMEOUT ${timeout} RESOURCE_LOCK gpus
        ENVIRONMENT TROUPE_TEST_BACKEND=cuda)
  endif()
endfunction()
