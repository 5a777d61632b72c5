"""Checks the files that scripts/plot-bench makes of small reports.

Usage: plot_bench.py TOP [REPORT]   TOP: the top of the project; REPORT: a report of
bench_all_reduce, which is drawn as well
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

SVG = '{http://www.w3.org/2000/svg}'


def row(verb, size, way, mode, us, in_flight=1):
    return {'verb': verb, 'bytes': size, 'in_flight': in_flight, 'way': way, 'mode': mode,
            'median_us': us, 'busbw_gb_s': size / us / 1e3}


def report(*rows, ranks=2):
    return {'machine': {'backend': 'cuda', 'devices': [{'name': 'a <GPU> & more'}]},
            'ranks': ranks, 'rows': list(rows)}


SMALL = report(row('all_reduce', 8, 'raw', 'threads', 10.0),
               row('all_reduce', 4096, 'raw', 'threads', 12.5),
               row('all_reduce', 8, 'direct', 'facade', 5.0),
               row('all_reduce', 4096, 'direct', 'facade', 6.0),
               row('all_reduce', 8, 'direct', 'facade', 0.001, in_flight=16),
               row('barrier', 0, 'nccl', 'rank_local', 20.0))


class sandbox:
    """Runs the script in a folder of its own."""

    def __init__(self, top, folder):
        self.script = top / 'scripts' / 'plot-bench'
        self.folder = pathlib.Path(folder)

    def run(self, *arguments):
        return subprocess.run([sys.executable, str(self.script), '--out', str(self.folder / 'out'),
                               *map(str, arguments)], capture_output=True, text=True)

    def write(self, name, content):
        path = self.folder / name
        path.write_text(json.dumps(content))
        return path

    def drawing(self, verb):
        """Returns the texts of a drawing, and its lines as lists of points."""
        root = xml.etree.ElementTree.parse(self.folder / 'out' / f'{verb}.svg').getroot()
        assert root.tag == SVG + 'svg'
        assert not any('href' in key for x in root.iter() for key in x.attrib), 'external resource'
        texts = [x.text for x in root.iter(SVG + 'text')]
        return texts, [x.get('points').split() for x in root.iter(SVG + 'polyline')]


def check_small(box):
    done = box.run(box.write('small.json', SMALL))
    assert done.returncode == 0, done.stderr
    texts, lines = box.drawing('all_reduce')
    for expected in ('all_reduce', 'raw NCCL, a thread per rank', 'troupe direct, facade',
                     'time of a call, median (us)', 'bus bandwidth (GB/s)', '8 B', '5', '20',
                     '2 ranks, cuda backend, a <GPU> & more'):
        assert expected in texts, (expected, texts)
    assert [len(x) for x in lines] == [2] * 4, lines # two contestants in two panels
    texts, lines = box.drawing('barrier')
    assert '20.0' in texts and 'troupe nccl, rank-local' in texts and not lines, texts


def check_median(box):
    files = [box.write(f'{us}.json', report(row('barrier', 0, 'nccl', 'facade', us)))
             for us in (10.0, 80.0, 30.0)]
    assert box.run(*files).returncode == 0
    assert '30.0' in box.drawing('barrier')[0]


def check_choice(box):
    assert box.run('--ways', 'direct', box.write('small.json', SMALL)).returncode == 0
    texts, lines = box.drawing('all_reduce')
    assert 'troupe direct, facade' in texts and len(lines) == 2, texts


def check_refusals(box):
    small = box.write('small.json', SMALL)
    for arguments, reason in (
            ([box.write('other.json', {'rows': []})], 'is no report of bench_all_reduce'),
            ([box.folder / 'missing.json'], 'is no report of bench_all_reduce'),
            ([small, box.write('ranks.json', report(ranks=3))], 'different numbers of ranks'),
            (['--modes', 'grouped', small], 'no calls')):
        done = box.run(*arguments)
        assert done.returncode != 0 and reason in done.stderr, (arguments, done.stderr)


def main():
    top = pathlib.Path(sys.argv[1])
    for check in (check_small, check_median, check_choice, check_refusals):
        with tempfile.TemporaryDirectory() as folder:
            check(sandbox(top, folder))
    for file in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as folder:
            box = sandbox(top, folder)
            done = box.run(file)
            assert done.returncode == 0, done.stderr
            for drawn in done.stdout.split():
                box.drawing(pathlib.Path(drawn).stem)
    print('plot-bench: the drawings are as expected')


if __name__ == '__main__':
    main()
