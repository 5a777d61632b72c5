# For Doxygen: the comment at the top of a header is about the file. One line more, and one less, so
# that the code keeps its line numbers.
1s|^/// |/// \\file\n/// |
/^#pragma once/d
