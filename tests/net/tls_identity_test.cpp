// Certificates that change while they are in use.

#include "net/tls_identity.hpp"
#include "remote/certificates.hpp"
#include "support/eventually.hpp"
#include "support/expect.hpp"
#include "support/log_lines.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

namespace troupe::testing {

namespace {

using detail::tls_identity;

/// The files of an identity, which others replace.
class TlsIdentity : public ::testing::Test {
protected:
  TlsIdentity()
      : first_(authority_.issue("first")), second_(authority_.issue("second")),
        files_{folder_.path("certificate"), folder_.path("key"), first_.authority} {
    put(first_.certificate, files_.certificate);
    put(first_.key, files_.key);
  }

  /// In one step, as a program that renews certificates does it.
  void put(const std::string& from, const std::string& to) const {
    const auto part = to + ".part";
    std::filesystem::copy_file(from, part);
    std::filesystem::rename(part, to);
  }
  static bool is_for(tls_identity& x, const std::string& name) {
    return x.current()->names() == std::vector{name};
  }

  test_authority authority_{"fleet"};
  temporary_folder folder_;
  const host_identity first_;
  const host_identity second_;
  const host_identity files_;
  log_lines lines_;
};

TEST_F(TlsIdentity, IsReadAnewWhenItsFilesChange) {
  const auto x = must(tls_identity::create(files_, detail::tls_context::side::parent));
  ASSERT_TRUE(is_for(*x, "first"));
  const auto before = x->current();
  put(second_.certificate, files_.certificate); // the key does not fit any more
  EXPECT_TRUE(eventually(
      [&] { return x->current() && lines_.count_of("changed certificates cannot be used") != 0; }));
  EXPECT_EQ(x->current(), before);
  put(second_.key, files_.key);
  EXPECT_TRUE(eventually([&] { return is_for(*x, "second"); }));
  EXPECT_TRUE(lines_.say("were read anew"));
}

TEST_F(TlsIdentity, StaysWhenAFileIsGone) {
  const auto x = must(tls_identity::create(files_, detail::tls_context::side::parent));
  std::filesystem::remove(files_.key);
  EXPECT_TRUE(eventually(
      [&] { return x->current() && lines_.count_of("changed certificates cannot be used") != 0; }));
  EXPECT_TRUE(is_for(*x, "first"));
  EXPECT_EQ(lines_.count_of("changed certificates cannot be used"), 1U); // not for each look
}

TEST_F(TlsIdentity, HasTheNamesOfItsCertificate) {
  const auto names = [&](const host_identity& who) {
    return must(detail::tls_context::create(who, detail::tls_context::side::agent))->names();
  };
  using list = std::vector<std::string>;
  EXPECT_EQ(names(authority_.issue_for("common", "DNS:a,IP:127.0.0.1,DNS:b", "clientAuth")),
            (list{"a", "b"}));
  EXPECT_EQ(names(authority_.issue_for("common", "IP:127.0.0.1", "clientAuth")), list{"common"});
  EXPECT_EQ(names(authority_.issue_for("common", "", "clientAuth")), list{"common"});
}

} // namespace

} // namespace troupe::testing
