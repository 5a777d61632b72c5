// The main function of every test binary: it is also that of its child processes, and of the
// workers that its devices live in.

#include "support/child_process.hpp"
#include <troupe/worker.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

int main(int argc, char** argv) {
#ifdef __SANITIZE_THREAD__
  // The sanitizer has a thread of its own from the first one on; tests count threads.
  std::thread{[] {}}.join();
#endif
  // A child may have workers, and a worker may be a child: what its scenario says comes first.
  if (auto status = troupe::worker_main(0, nullptr))
    return *status;
  if (auto status = troupe::testing::run_as_child(argc, argv))
    return *status;
  if (auto status = troupe::worker_main(argc, argv))
    return *status;
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
