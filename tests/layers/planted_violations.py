"""Plants one violation of each kind in a copy of the sources: scripts/check-layers has to name it.

Usage: planted_violations.py TOP   TOP: the top of the project
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile


def insert_line(path, text):
    """Inserts a line behind the first include of a file, and returns its number."""
    lines = path.read_text().split('\n')
    at = next(i for i, x in enumerate(lines) if x.startswith('#include'))
    lines.insert(at + 1, text)
    path.write_text('\n'.join(lines))
    return at + 2


def replace(path, old, new):
    text = path.read_text()
    if old not in text:
        raise RuntimeError(f'{path} does not contain {old!r}')
    path.write_text(text.replace(old, new, 1))


def included(path, directive, rule):
    """Returns a function that plants an include directive, of which `rule` is to be told."""
    return lambda top: f'{path}:{insert_line(top / path, directive)}: {rule}'


INCLUDES = {
    'include of an upper module':
        included('src/foundation/wire.cpp', '#include "lane/lane.hpp"',
                 'foundation may not use lane: "lane/lane.hpp"'),
    'relative include':
        included('src/foundation/wire.cpp', '#include "../lane/lane.hpp"',
                 'name the folder of "../lane/lane.hpp" from src/ on'),
    'include in angle brackets':
        included('src/foundation/wire.cpp', '#include <lane/lane.hpp>',
                 'foundation may not use lane: "lane/lane.hpp"'),
    'include without use':
        included('src/lane/lane.cpp', '#include "foundation/wire.hpp"',
                 'no name of "foundation/wire.hpp" is used here'),
    'public include without use':
        included('src/foundation/wire.cpp', '#include <troupe/mesh_comm.hpp>',
                 'no name of "troupe/mesh_comm.hpp" is used here'),
}


def circle(top):
    replace(top / 'src/CMakeLists.txt', 'troupe_add_module(operation\n  USES foundation\n',
            'troupe_add_module(operation\n  USES foundation lane\n')
    return 'modules use each other in a circle: operation -> lane -> operation'


def use_that_is_none(top):
    replace(top / 'src/CMakeLists.txt', 'troupe_add_module(backend/cuda\n  USES foundation\n',
            'troupe_add_module(backend/cuda\n  USES foundation net\n')
    return 'backend/cuda lists net and includes none of it'


def file_in_no_module(top):
    (top / 'src/stray').mkdir()
    (top / 'src/stray/stray.hpp').write_text('#pragma once\n')
    return 'src/stray/stray.hpp:1: the file is in no module of src/CMakeLists.txt'


def check(top):
    return subprocess.run([sys.executable, top / 'scripts/check-layers', top], capture_output=True,
                          text=True, check=False)


def main():
    project = pathlib.Path(sys.argv[1]).resolve()
    failed = False
    violations = INCLUDES | {'circle': circle, 'use that is none': use_that_is_none,
                             'file in no module': file_in_no_module}
    for name, plant in violations.items():
        with tempfile.TemporaryDirectory() as folder:
            top = pathlib.Path(folder) / 'copy'
            for part in ('src', 'include', 'scripts'):
                shutil.copytree(project / part, top / part)
            if (before := check(top)).returncode != 0:
                sys.exit(f'the copy has violations already:\n{before.stdout}')
            wanted = plant(top)
            result = check(top)
            good = result.returncode != 0 and wanted in result.stdout
            print(f'{"ok" if good else "FAILED"}: {name}')
            if not good:
                print(f'wanted: {wanted}\ngot ({result.returncode}):\n{result.stdout}')
                failed = True
    sys.exit(1 if failed else 0)


if __name__ == '__main__':
    main()
