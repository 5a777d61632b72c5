/// Simulates a process that cannot create threads.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>

#include <pthread.h>

namespace troupe::testing {

/// No thread can be created during its lifetime, because the default stack size is too large.
class no_threads {
public:
  no_threads() {
    pthread_attr_t wanted;
    EXPECT_EQ(::pthread_getattr_default_np(&before_), 0);
    EXPECT_EQ(::pthread_getattr_default_np(&wanted), 0);
    EXPECT_EQ(::pthread_attr_setstacksize(&wanted, std::size_t{1} << 47), 0);
    EXPECT_EQ(::pthread_setattr_default_np(&wanted), 0);
    EXPECT_EQ(::pthread_attr_destroy(&wanted), 0);
  }
  ~no_threads() {
    EXPECT_EQ(::pthread_setattr_default_np(&before_), 0);
    EXPECT_EQ(::pthread_attr_destroy(&before_), 0);
  }
  no_threads(const no_threads&) = delete;
  no_threads& operator=(const no_threads&) = delete;

private:
  pthread_attr_t before_{};
};

} // namespace troupe::testing
