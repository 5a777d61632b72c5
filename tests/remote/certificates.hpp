/// Certificates for tests, made at run time.
#pragma once

#include <troupe/worker.hpp>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

struct evp_pkey_st;
struct x509_st;

namespace troupe::testing {

/// A folder that its owner deletes.
class temporary_folder {
public:
  temporary_folder();
  ~temporary_folder();
  temporary_folder(const temporary_folder&) = delete;
  temporary_folder& operator=(const temporary_folder&) = delete;

  std::string path(const std::string& name) const { return (path_ / name).string(); }
  /// Writes a file. @return its path
  std::string write(const std::string& name, const std::string& content) const;

private:
  std::filesystem::path path_;
};

/// Signs certificates.
class test_authority {
public:
  explicit test_authority(const std::string& name);

  /// Issues one more certificate. Returns its files, with this authority as the trusted one.
  /// `address`: address of the certificate, in addition to its name.
  host_identity issue(const std::string& name, const std::string& address = "127.0.0.1");
  /// Issues a certificate that expired yesterday.
  host_identity issue_expired(const std::string& name);
  /// Issues a certificate whose subject has `units` organizational units of 60 characters, too.
  host_identity issue_with_units(const std::string& name, int units);
  /// Issues a certificate with these alternative names and this usage, in OpenSSL's notation.
  host_identity issue_for(const std::string& name, const std::string& names,
                          const std::string& usage);
  /// Makes a list of revoked certificates that is valid for `days` from yesterday. Returns its
  /// file.
  std::string revoke(const std::vector<host_identity>& revoked, int days = 30);
  const std::string& file() const noexcept { return file_; }

private:
  struct deleter {
    void operator()(evp_pkey_st* x) const noexcept;
    void operator()(x509_st* x) const noexcept;
  };

  struct request {
    std::string names;
    long from;
    long until;
    int units = 0;
    std::string usage = "serverAuth,clientAuth";
  };

  host_identity issue_as(const std::string& name, const request& what);

  temporary_folder folder_;
  std::unique_ptr<evp_pkey_st, deleter> key_;
  std::unique_ptr<x509_st, deleter> certificate_;
  std::string file_;
  int issued_ = 0;
  std::map<std::string, long> numbers_; ///< of the certificates, by their files
};

} // namespace troupe::testing
