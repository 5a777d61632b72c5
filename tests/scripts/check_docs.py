"""Plants one violation of each kind in a copy of the pages: scripts/check-docs has to name it.

Usage: check_docs.py TOP   TOP: the top of the project
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile


def replace(path, old, new):
    text = path.read_text(encoding='utf-8')
    if old not in text:
        raise RuntimeError(f'{path} does not contain {old!r}')
    path.write_text(text.replace(old, new, 1), encoding='utf-8')


def planted(path, old, new, wanted):
    """Returns a function that replaces text in a file of a copy, and returns what is to be told."""
    def plant(top):
        replace(top / path, old, new)
        return wanted
    return plant


def stray_program(top):
    (top / 'docs/snippets/stray.cpp').write_text('int main() {}\n', encoding='utf-8')
    return 'docs/snippets/stray.cpp: no page shows anything of it'


def new_header(top):
    (top / 'include/troupe/stray.hpp').write_text('#pragma once\n', encoding='utf-8')
    return 'docs/reference.md: has no link to stray.hpp'


def new_error(top):
    replace(top / 'include/troupe/error.hpp', '  cancelled, ', '  withdrawn,\n  cancelled, ')
    replace(top / 'src/foundation/error.cpp', 'case errc::cancelled:',
            'case errc::withdrawn:\n  case errc::cancelled:')
    return 'needs a section "### `withdrawn`" that begins with *operation*'


def swap_sections(path, one, other):
    """Swaps two sections of one severity, which follow each other."""
    text = path.read_text(encoding='utf-8')
    for old, new in ((one, '1'), (other, one), ('1', other)):
        text = text.replace(f'### `{old}`', f'### `{new}`')
    path.write_text(text, encoding='utf-8')
    return 'the codes are not in the order of the header'


SUM = 'world->all_reduce(*grads, {.deadline'
SNIPPET = '<!-- snippet: guide.cpp#task -->\n'
VIOLATIONS = {
    'code that differs on the page':
        planted('README.md', SUM, 'world->reduce_all(*grads, {.deadline',
                'differs from its snippet: <!-- snippet: readme.cpp -->'),
    'code that differs in the program':
        planted('docs/snippets/guide.cpp', 'co_return first[0];', 'co_return first[1];',
                'differs from its snippet: <!-- snippet: guide.cpp#task -->'),
    'code that differs in an example':
        planted('examples/heat.cpp', 'p.rank.exchange(sends, recvs);', 'p.rank.exchange(recvs, sends);',
                'differs from its snippet: <!-- snippet: examples/heat.cpp#step -->'),
    'CMake that differs':
        planted('docs/snippets/first_sum/CMakeLists.txt', 'find_package(troupe REQUIRED)',
                'find_package(troupe 9 REQUIRED)',
                'differs from its snippet: <!-- snippet: first_sum/CMakeLists.txt#link -->'),
    'code without a snippet':
        planted('docs/requests.md', SNIPPET, '', 'a block of cpp needs a line <!-- snippet: FILE#REGION -->'),
    'region that is not there':
        planted('docs/requests.md', SNIPPET, SNIPPET.replace('task', 'tusk'),
                'docs/snippets/guide.cpp has 0 lines with [tusk], not 2'),
    'file that is not there':
        planted('docs/requests.md', SNIPPET, SNIPPET.replace('guide', 'guise'),
                'there is no file docs/snippets/guise.cpp'),
    'language that is not known':
        planted('docs/requests.md', SNIPPET + '```cpp', SNIPPET + '```c',
                'blocks of c are neither checked nor exempt'),
    'code in a list':
        planted('docs/requests.md', SNIPPET + '```cpp', SNIPPET + '  ```cpp',
                'a block with a snippet must not be indented'),
    'program that no page shows': stray_program,
    'call that does not compile':
        planted('docs/from-mpi.md', '`me.barrier()`', '`me.barriers()`',
                'docs/snippets/calls.cpp has no me.barriers()'),
    'link to no file':
        planted('docs/index.md', '(start.md)', '(begin.md)', 'the link begin.md leads nowhere'),
    'link to no heading':
        planted('README.md', 'docs/errors.md#what-a-request-leaves-behind', 'docs/errors.md#behind',
                'the link docs/errors.md#behind leads to no heading'),
    'error without a section':
        planted('docs/errors.md', '### `stalled`', '### Stalled',
                'docs/errors.md: needs a section "### `stalled`" that begins with *communicator*'),
    'section of no error':
        planted('docs/errors.md', '### `stalled`', '### `stolen`', 'there is no errc::stolen'),
    'wrong severity':
        planted('docs/errors.md', '*process* — A sticky', '*device* — A sticky',
                'needs a section "### `device_fault`" that begins with *process*'),
    'header that is new': new_header,
    'error that is new': new_error,
    'errors in another order':
        lambda top: swap_sections(top / 'docs/errors.md', 'nccl_error', 'stalled'),
}


def check(top, *options):
    return subprocess.run([sys.executable, top / 'scripts/check-docs', *options, top],
                          capture_output=True, text=True, check=False)


def copy(project, folder):
    top = pathlib.Path(folder) / 'copy'
    for part in ('docs', 'include', 'scripts', 'src/foundation', 'examples'):
        shutil.copytree(project / part, top / part)
    for file in ('README.md', 'CHANGELOG.md', 'LICENSE'):
        shutil.copy(project / file, top / file)
    return top


def fix_mends(project):
    """Returns whether --fix makes pages equal to their snippets, and changes nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        top = copy(project, folder)
        before = (top / 'README.md').read_text(encoding='utf-8')
        replace(top / 'README.md', SUM, 'nonsense(')
        return (check(top, '--fix').returncode == 0 and check(top).returncode == 0 and
                (top / 'README.md').read_text(encoding='utf-8') == before)


def main():
    project = pathlib.Path(sys.argv[1]).resolve()
    failed = False
    for name, plant in VIOLATIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            top = copy(project, folder)
            if (before := check(top)).returncode != 0:
                sys.exit(f'the copy has violations already:\n{before.stdout}{before.stderr}')
            wanted = plant(top)
            result = check(top)
            good = result.returncode == 1 and wanted in result.stdout
            print(f'{"ok" if good else "FAILED"}: {name}')
            if not good:
                print(f'wanted: {wanted}\ngot ({result.returncode}):\n{result.stdout}{result.stderr}')
                failed = True
    mends = fix_mends(project)
    print(f'{"ok" if mends else "FAILED"}: --fix')
    sys.exit(0 if mends and not failed else 1)


if __name__ == '__main__':
    main()
