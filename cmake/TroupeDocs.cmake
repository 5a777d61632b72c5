# The target docs: a site with the guide (docs/, by Sphinx with MyST) and the reference from the
# comments in the public headers (Doxygen). A warning is an error.

find_package(Doxygen QUIET)
find_program(TROUPE_SPHINX sphinx-build DOC "Sphinx's program, for the guide")
mark_as_advanced(TROUPE_SPHINX)
if(NOT DOXYGEN_FOUND OR NOT TROUPE_SPHINX)
  message(STATUS "troupe: no target docs, which needs Doxygen and Sphinx (sphinx-build)")
  return()
endif()

set(TROUPE_SITE_DIR "${PROJECT_BINARY_DIR}/site")
set(reference_tags "${PROJECT_BINARY_DIR}/reference.tags")

set(DOXYGEN_ALIASES
  [[shape=\par Shape:^^]]
  [[units=\par Units:^^]]
  [[thread=\par Thread:^^]]
  [[errors=\par Errors:^^]]
  [[invariant=\par Invariant:^^]]
  [[source=\par Source:^^]])
set(DOXYGEN_INPUT_FILTER "sed -f ${PROJECT_SOURCE_DIR}/cmake/file_comments.sed")
set(DOXYGEN_EXTRACT_ALL YES) # namespaces have no comments of their own
set(DOXYGEN_EXCLUDE_SYMBOLS "troupe::detail" "troupe::detail::*" "troupe::inspect")
set(DOXYGEN_WARN_AS_ERROR FAIL_ON_WARNINGS)
set(DOXYGEN_WARN_IF_UNDOCUMENTED NO)
set(DOXYGEN_WARN_IF_INCOMPLETE_DOC NO) # comments need not name each parameter
set(DOXYGEN_JAVADOC_AUTOBRIEF YES)
set(DOXYGEN_GENERATE_LATEX NO)
set(DOXYGEN_EXCLUDE_PATTERNS "*/detail/*")
set(DOXYGEN_STRIP_FROM_PATH "${PROJECT_SOURCE_DIR}/include")
set(DOXYGEN_QUIET YES)
set(DOXYGEN_OUTPUT_DIRECTORY "${TROUPE_SITE_DIR}")
set(DOXYGEN_HTML_OUTPUT reference)
set(DOXYGEN_GENERATE_TAGFILE "${reference_tags}")
set(DOXYGEN_HTML_EXTRA_STYLESHEET "${PROJECT_SOURCE_DIR}/docs/site/reference.css")
set(DOXYGEN_SHOW_INCLUDE_FILES NO)
set(DOXYGEN_HAVE_DOT NO)
doxygen_add_docs(docs_reference
  "${PROJECT_SOURCE_DIR}/include/troupe" "${PROJECT_SOURCE_DIR}/docs/site/reference_main.dox"
  COMMENT "The reference, with Doxygen")

add_custom_target(docs
  COMMAND "${CMAKE_COMMAND}" -E env
    "TROUPE_VERSION=${PROJECT_VERSION}" "TROUPE_REFERENCE_TAGS=${reference_tags}"
    "${TROUPE_SPHINX}" -E -a -W --keep-going -q -b html -d "${PROJECT_BINARY_DIR}/site.doctrees"
    -c "${PROJECT_SOURCE_DIR}/docs/site" "${PROJECT_SOURCE_DIR}/docs" "${TROUPE_SITE_DIR}"
  COMMENT "The guide, with Sphinx: ${TROUPE_SITE_DIR}/index.html"
  VERBATIM)
add_dependencies(docs docs_reference)
