#include <caf/all.hpp>
#include <iostream>
#include <troupe/version.hpp>

int main() { std::cout << "troupe " << troupe::version_string << '\n'; }
