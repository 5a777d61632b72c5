#include "remote/certificates.hpp"

#include <array>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

namespace troupe::testing {

namespace {

constexpr long day = 24 * 3600;

/// Throws if OpenSSL returned an error.
template <class T> T* there(T* x, const char* what) {
  if (x == nullptr)
    throw std::runtime_error(what);
  return x;
}

void right(int x, const char* what) {
  if (x <= 0)
    throw std::runtime_error(what);
}

/// Makes a key. Initializes OpenSSL first, so that it stays usable until the process ends.
EVP_PKEY* new_key() {
  right(OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr), "OPENSSL_init_crypto");
  return there(EVP_EC_gen("P-256"), "EVP_EC_gen");
}

using any_bio = std::unique_ptr<BIO, decltype(&BIO_free)>;

std::string text_of(BIO* x) {
  char* first = nullptr;
  const auto size = BIO_get_mem_data(x, &first);
  return {first, static_cast<std::size_t>(size)};
}

std::string pem_of(X509* x) {
  any_bio to{there(BIO_new(BIO_s_mem()), "BIO_new"), BIO_free};
  right(PEM_write_bio_X509(to.get(), x), "PEM_write_bio_X509");
  return text_of(to.get());
}

std::string pem_of(EVP_PKEY* x) {
  any_bio to{there(BIO_new(BIO_s_mem()), "BIO_new"), BIO_free};
  right(PEM_write_bio_PrivateKey(to.get(), x, nullptr, nullptr, 0, nullptr, nullptr),
        "PEM_write_bio_PrivateKey");
  return text_of(to.get());
}

void add(X509* to, X509* issuer, int what, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, to, nullptr, nullptr, 0);
  std::unique_ptr<X509_EXTENSION, decltype(&X509_EXTENSION_free)> extension{
      there(X509V3_EXT_conf_nid(nullptr, &context, what, value.c_str()), "X509V3_EXT_conf_nid"),
      X509_EXTENSION_free};
  right(X509_add_ext(to, extension.get(), -1), "X509_add_ext");
}

void add_to_subject(X509* to, const char* what, const std::string& value) {
  right(X509_NAME_add_entry_by_txt(X509_get_subject_name(to), what, MBSTRING_UTF8,
                                   reinterpret_cast<const unsigned char*>(value.c_str()), -1, -1,
                                   0),
        "X509_NAME_add_entry_by_txt");
}

X509* make(const std::string& name, EVP_PKEY* key, long number, long from, long until) {
  auto* x = there(X509_new(), "X509_new");
  right(X509_set_version(x, X509_VERSION_3), "X509_set_version");
  right(ASN1_INTEGER_set(X509_get_serialNumber(x), number), "ASN1_INTEGER_set");
  there(X509_gmtime_adj(X509_getm_notBefore(x), from), "X509_gmtime_adj");
  there(X509_gmtime_adj(X509_getm_notAfter(x), until), "X509_gmtime_adj");
  right(X509_set_pubkey(x, key), "X509_set_pubkey");
  add_to_subject(x, "CN", name);
  return x;
}

} // namespace

temporary_folder::temporary_folder() {
  auto name = (std::filesystem::temp_directory_path() / "troupe-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr)
    throw std::system_error(errno, std::generic_category(), "mkdtemp");
  path_ = name;
}

temporary_folder::~temporary_folder() {
  std::error_code ignored; // remaining files are ignored
  std::filesystem::remove_all(path_, ignored);
}

std::string temporary_folder::write(const std::string& name, const std::string& content) const {
  auto result = path(name);
  std::ofstream to{result, std::ios::binary};
  to << content;
  to.close();
  if (!to)
    throw std::runtime_error("cannot write " + result);
  return result;
}

void test_authority::deleter::operator()(evp_pkey_st* x) const noexcept { EVP_PKEY_free(x); }
void test_authority::deleter::operator()(x509_st* x) const noexcept { X509_free(x); }

test_authority::test_authority(const std::string& name) : key_(new_key()) {
  certificate_.reset(make(name, key_.get(), 1, -day, 30 * day));
  auto* x = certificate_.get();
  right(X509_set_issuer_name(x, X509_get_subject_name(x)), "X509_set_issuer_name");
  add(x, x, NID_basic_constraints, "critical,CA:TRUE");
  add(x, x, NID_key_usage, "critical,keyCertSign,cRLSign");
  add(x, x, NID_subject_key_identifier, "hash");
  right(X509_sign(x, key_.get(), EVP_sha256()), "X509_sign");
  file_ = folder_.write("authority.pem", pem_of(x));
}

host_identity test_authority::issue(const std::string& name, const std::string& address) {
  return issue_as(name, {"DNS:" + name + ",IP:" + address, -day, 30 * day});
}

host_identity test_authority::issue_expired(const std::string& name) {
  return issue_as(name, {"DNS:" + name + ",IP:127.0.0.1", -2 * day, -day});
}

host_identity test_authority::issue_with_units(const std::string& name, int units) {
  return issue_as(name, {"DNS:" + name + ",IP:127.0.0.1", -day, 30 * day, units});
}

host_identity test_authority::issue_for(const std::string& name, const std::string& names,
                                        const std::string& usage) {
  return issue_as(name, {names, -day, 30 * day, 0, usage});
}

host_identity test_authority::issue_as(const std::string& name, const request& what) {
  std::unique_ptr<EVP_PKEY, deleter> key{new_key()};
  const auto number = 1 + ++issued_;
  std::unique_ptr<X509, deleter> x{make(name, key.get(), number, what.from, what.until)};
  for (int i = 0; i < what.units; ++i)
    add_to_subject(x.get(), "OU", std::string(60, 'u'));
  right(X509_set_issuer_name(x.get(), X509_get_subject_name(certificate_.get())),
        "X509_set_issuer_name");
  add(x.get(), certificate_.get(), NID_basic_constraints, "critical,CA:FALSE");
  add(x.get(), certificate_.get(), NID_ext_key_usage, what.usage);
  if (!what.names.empty())
    add(x.get(), certificate_.get(), NID_subject_alt_name, what.names);
  right(X509_sign(x.get(), key_.get(), EVP_sha256()), "X509_sign");
  const auto end = std::to_string(number) + ".pem";
  host_identity result{folder_.write("certificate-" + end, pem_of(x.get())),
                       folder_.write("key-" + end, pem_of(key.get())), file_};
  numbers_[result.certificate] = number;
  return result;
}

std::string test_authority::revoke(const std::vector<host_identity>& revoked, int days) {
  const auto free_list = [](X509_CRL* x) { X509_CRL_free(x); };
  const std::unique_ptr<X509_CRL, decltype(free_list)> list{there(X509_CRL_new(), "X509_CRL_new"),
                                                            free_list};
  const auto time = [](long from_now) {
    return std::unique_ptr<ASN1_TIME, decltype(&ASN1_TIME_free)>{
        there(X509_gmtime_adj(nullptr, from_now), "X509_gmtime_adj"), ASN1_TIME_free};
  };
  right(X509_CRL_set_version(list.get(), X509_CRL_VERSION_2), "X509_CRL_set_version");
  right(X509_CRL_set_issuer_name(list.get(), X509_get_subject_name(certificate_.get())),
        "X509_CRL_set_issuer_name");
  right(X509_CRL_set1_lastUpdate(list.get(), time(-day).get()), "X509_CRL_set1_lastUpdate");
  right(X509_CRL_set1_nextUpdate(list.get(), time((days - 1) * day - 60).get()),
        "X509_CRL_set1_nextUpdate");
  for (auto& x : revoked) {
    auto* entry = there(X509_REVOKED_new(), "X509_REVOKED_new");
    const std::unique_ptr<ASN1_INTEGER, decltype(&ASN1_INTEGER_free)> number{
        there(ASN1_INTEGER_new(), "ASN1_INTEGER_new"), ASN1_INTEGER_free};
    right(ASN1_INTEGER_set(number.get(), numbers_.at(x.certificate)), "ASN1_INTEGER_set");
    right(X509_REVOKED_set_serialNumber(entry, number.get()), "X509_REVOKED_set_serialNumber");
    right(X509_REVOKED_set_revocationDate(entry, time(-day).get()),
          "X509_REVOKED_set_revocationDate");
    right(X509_CRL_add0_revoked(list.get(), entry), "X509_CRL_add0_revoked");
  }
  right(X509_CRL_sign(list.get(), key_.get(), EVP_sha256()), "X509_CRL_sign");
  const any_bio to{there(BIO_new(BIO_s_mem()), "BIO_new"), BIO_free};
  right(PEM_write_bio_X509_CRL(to.get(), list.get()), "PEM_write_bio_X509_CRL");
  return folder_.write("revoked-" + std::to_string(++issued_) + ".pem", text_of(to.get()));
}

} // namespace troupe::testing
