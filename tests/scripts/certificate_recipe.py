"""Runs the recipe for certificates in docs/recipes/hosts.md, and checks what the certificates are good for.

Usage: certificate_recipe.py TOP   TOP: the top of the project
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SKIPPED = 77


def recipes(top):
    """Returns the commands that make certificates, and those that revoke one."""
    text = (top / 'docs' / 'recipes' / 'hosts.md').read_text(encoding='utf-8')
    text = text[text.index('The operator provides the certificates'):]
    return re.findall(r'```sh\n(.*?)```', text, re.DOTALL)[:2]


def is_good(folder, certificate, *options):
    """Returns whether OpenSSL accepts the certificate as one of the fleet, for these options."""
    return subprocess.run(['openssl', 'verify', '-CAfile', 'fleet.pem', *options, certificate],
                          cwd=folder, check=False, capture_output=True).returncode == 0


def main():
    if shutil.which('openssl') is None:
        print('there is no command openssl')
        return SKIPPED
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for commands in recipes(pathlib.Path(sys.argv[1])):
            subprocess.run(['sh', '-e'], input=commands, cwd=folder, check=True, text=True)
        revoked = ('-crl_check', '-CRLfile', 'revoked.pem')
        for expected, certificate, *options in (
                (True, 'parent.pem', '-purpose', 'sslserver', '-verify_ip', '192.0.2.10'),
                (True, 'parent.pem', '-purpose', 'sslserver', '-verify_hostname', 'parent'),
                (False, 'parent.pem', '-purpose', 'sslserver', '-verify_ip', '192.0.2.11'),
                (False, 'parent.pem', '-purpose', 'sslclient'),
                (True, 'alpha.pem', '-purpose', 'sslclient', '-verify_hostname', 'alpha'),
                (True, 'beta.pem', '-purpose', 'sslclient', '-verify_hostname', 'beta'),
                (False, 'beta.pem', '-purpose', 'sslclient', '-verify_hostname', 'alpha'),
                (False, 'alpha.pem', '-purpose', 'sslserver'),
                (False, 'alpha.pem', '-purpose', 'sslclient', *revoked),
                (True, 'beta.pem', '-purpose', 'sslclient', *revoked)):
            if is_good(folder, certificate, *options) != expected:
                print(f'{certificate} is {"not " if expected else ""}good for {" ".join(options)}')
                failures += 1
    return 1 if failures else 0


if __name__ == '__main__':
    sys.exit(main())
