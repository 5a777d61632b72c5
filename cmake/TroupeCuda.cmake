# Decides whether the CUDA backend is built. Sets
#
#   TROUPE_HAS_CUDA     TRUE or FALSE
#   TROUPE_CUDA_STATUS  one sentence: on or off, and why (also a cache entry that scripts read)
#
# and, when it is TRUE, finds CUDAToolkit and NCCL and enables the CUDA language.

set(TROUPE_NCCL_MINIMUM 2.28.7)

# A macro, so that variables of find_package and enable_language reach the caller's scope.
macro(troupe_find_cuda)
  set(TROUPE_HAS_CUDA FALSE)
  set(_troupe_why "")
  if(TROUPE_WITH_CUDA STREQUAL "OFF")
    set(_troupe_why "TROUPE_WITH_CUDA is OFF")
  else()
    find_package(CUDAToolkit QUIET)
    if(NOT CUDAToolkit_FOUND)
      set(_troupe_why "no CUDA toolkit was found (CUDAToolkit_ROOT says where one is)")
    elseif(CUDAToolkit_VERSION VERSION_LESS 13)
      set(_troupe_why "CUDA ${CUDAToolkit_VERSION} is older than 13")
    else()
      find_package(NCCL ${TROUPE_NCCL_MINIMUM} QUIET)
      if(NOT NCCL_FOUND AND NCCL_VERSION)
        set(_troupe_why "NCCL ${NCCL_VERSION} is older than ${TROUPE_NCCL_MINIMUM}")
      elseif(NOT NCCL_FOUND)
        set(_troupe_why "no NCCL was found (NCCL_ROOT says where one is)")
      else()
        # nvcc may be missing from the path: the toolkit knows its own.
        if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND CUDAToolkit_NVCC_EXECUTABLE)
          set(ENV{CUDACXX} "${CUDAToolkit_NVCC_EXECUTABLE}")
        endif()
        if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
          # Code for Hopper, and PTX that all later GPUs, and older ones down to Turing, compile
          # when they load it: the kernels are few and small.
          set(CMAKE_CUDA_ARCHITECTURES "75-virtual;90" CACHE STRING "CUDA architectures")
        endif()
        include(CheckLanguage)
        check_language(CUDA)
        if(CMAKE_CUDA_COMPILER)
          enable_language(CUDA)
          set(TROUPE_HAS_CUDA TRUE)
        else()
          set(_troupe_why "the CUDA compiler of ${CUDAToolkit_BIN_DIR} does not work here")
        endif()
      endif()
    endif()
    if(TROUPE_WITH_CUDA STREQUAL "ON" AND NOT TROUPE_HAS_CUDA)
      message(FATAL_ERROR "troupe: TROUPE_WITH_CUDA is ON, but ${_troupe_why}.")
    endif()
  endif()
  if(TROUPE_HAS_CUDA)
    set(TROUPE_CUDA_STATUS "on: CUDA ${CUDAToolkit_VERSION}, NCCL ${NCCL_VERSION}")
  else()
    set(TROUPE_CUDA_STATUS "off: ${_troupe_why}")
  endif()
  set(TROUPE_CUDA_STATUS "${TROUPE_CUDA_STATUS}" CACHE INTERNAL "whether the CUDA backend is built")
  unset(_troupe_why)
endmacro()
