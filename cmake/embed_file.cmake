# Writes OUTPUT, a C++ source with the bytes of FILE as the array NAME.

cmake_minimum_required(VERSION 3.25)

file(READ "${FILE}" bytes HEX)
if(bytes STREQUAL "")
  message(FATAL_ERROR "${FILE} is empty")
endif()
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE "${OUTPUT}"
  "extern \"C\" {\nextern const unsigned char ${NAME}[];\n"
  "alignas(16) const unsigned char ${NAME}[] = {\n${bytes}};\n}\n")
