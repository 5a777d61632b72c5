// The main function of every test binary. Child processes and workers of a test use the same binary
// and this main function.

#include "support/child_process.hpp"
#include <troupe/worker.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

int main(int argc, char** argv) {
#ifdef __SANITIZE_THREAD__
  // ThreadSanitizer adds a thread with the first one. Tests count threads, so add it here.
  std::thread{[] {}}.join();
#endif
  // A child may start workers: worker_main() without arguments only registers this program as its
  // own worker. A worker may run a child's scenario, so run_as_child() comes before the next call.
  if (auto status = troupe::worker_main(0, nullptr))
    return *status;
  if (auto status = troupe::testing::run_as_child(argc, argv))
    return *status;
  if (auto status = troupe::worker_main(argc, argv))
    return *status;
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
