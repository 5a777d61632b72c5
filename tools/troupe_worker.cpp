// The process of one device (troupe/worker.hpp): started by the library, not by hand.

#include <troupe/worker.hpp>

#include <cstdio>

int main(int argc, char** argv) {
  if (auto status = troupe::worker_main(argc, argv))
    return *status;
  std::fputs("troupe-worker is started by programs whose devices live in worker processes\n",
             stderr);
  return 2;
}
