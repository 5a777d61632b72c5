# Fails if one of FILES requires a CUDA or NCCL library at load time.

cmake_minimum_required(VERSION 3.25)

if(NOT FILES)
  message(FATAL_ERROR "no file to look at")
endif()
foreach(file IN LISTS FILES)
  if(file MATCHES "\\.a$")
    continue() # a static library has no NEEDED entries; the programs cover it
  endif()
  execute_process(COMMAND "${READELF}" -d "${file}"
    OUTPUT_VARIABLE dynamic COMMAND_ERROR_IS_FATAL ANY)
  if(NOT dynamic MATCHES "NEEDED.*libc\\.so")
    message(FATAL_ERROR "${file}: readelf tells nothing of what it needs: ${dynamic}")
  endif()
  if(dynamic MATCHES "NEEDED[^\n]*(lib(cuda|cudart|nccl|nvidia-ml|nvrtc)\\.so[^]]*)")
    message(SEND_ERROR "${file} needs ${CMAKE_MATCH_1}")
  endif()
endforeach()
