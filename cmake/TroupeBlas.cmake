# Finds the system's BLAS with its C interface, for products on the host. Sets
#
#   TROUPE_HAS_BLAS   TRUE or FALSE

set(TROUPE_HAS_BLAS FALSE)
if(NOT TROUPE_WITH_BLAS STREQUAL "OFF")
  find_package(BLAS QUIET)
  if(BLAS_FOUND)
    include(CheckCXXSymbolExists)
    set(CMAKE_REQUIRED_LIBRARIES BLAS::BLAS)
    check_cxx_symbol_exists(cblas_sgemm cblas.h TROUPE_HAS_CBLAS)
    unset(CMAKE_REQUIRED_LIBRARIES)
    if(TROUPE_HAS_CBLAS)
      set(TROUPE_HAS_BLAS TRUE)
    endif()
  endif()
  if(TROUPE_WITH_BLAS STREQUAL "ON" AND NOT TROUPE_HAS_BLAS)
    message(FATAL_ERROR "troupe: TROUPE_WITH_BLAS is ON, but no BLAS with cblas.h was found.")
  endif()
endif()
