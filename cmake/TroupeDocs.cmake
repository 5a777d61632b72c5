# The target docs: the reference from the comments in the public headers. A warning is an error.

find_package(Doxygen QUIET)
if(NOT DOXYGEN_FOUND)
  return()
endif()

set(DOXYGEN_ALIASES
  [[shape="\par Shape:^^"]]
  [[units="\par Units:^^"]]
  [[thread="\par Thread:^^"]]
  [[errors="\par Errors:^^"]]
  [[invariant="\par Invariant:^^"]]
  [[source="\par Source:^^"]])
set(DOXYGEN_WARN_AS_ERROR FAIL_ON_WARNINGS)
set(DOXYGEN_WARN_IF_UNDOCUMENTED NO)
set(DOXYGEN_JAVADOC_AUTOBRIEF YES)
set(DOXYGEN_GENERATE_LATEX NO)
set(DOXYGEN_EXCLUDE_PATTERNS "*/detail/*")
set(DOXYGEN_STRIP_FROM_PATH "${PROJECT_SOURCE_DIR}/include")
set(DOXYGEN_QUIET YES)
doxygen_add_docs(docs "${PROJECT_SOURCE_DIR}/include/troupe" COMMENT "The reference, with Doxygen")
