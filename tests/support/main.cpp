// The main function of every test binary: it is also that of its child processes.

#include "support/child_process.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  if (auto status = troupe::testing::run_as_child(argc, argv))
    return *status;
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
