"""Sphinx's configuration for the site of the guide (target `docs`, cmake/TroupeDocs.cmake).

The pages are plain Markdown for GitHub, too. What the site needs in addition is made here: the
tables of contents, from the lists of links in index.md, and the links to the API reference.
"""

import os
import pathlib
import re
import xml.etree.ElementTree

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

project = 'troupe'
version = release = os.environ.get('TROUPE_VERSION', '')
copyright = 'the authors of troupe; license: BSD-3-Clause'  # pylint: disable=redefined-builtin
extensions = ['myst_parser']
source_suffix = {'.md': 'markdown'}
exclude_patterns = ['site', 'snippets']
myst_heading_anchors = 4
highlight_language = 'none'
html_theme = 'furo'
html_title = f'troupe {version}'
html_static_path = ['static']
html_css_files = ['style.css']
html_copy_source = False
html_show_sphinx = False

LOG = logging.getLogger(__name__)
DOCS = pathlib.Path(__file__).resolve().parent.parent
HEADERS = DOCS.parent / 'include'
LINK = re.compile(r'\[([^\]]+)\]\(([^):#]+)\)')


def tables_of_contents(text):
    """Returns a hidden toctree for each list of links to pages, with its heading as the caption."""
    result = []
    for part in re.split(r'^## ', text, flags=re.MULTILINE)[1:]:
        caption, _, body = part.partition('\n')
        pages = re.findall(r'^- \[[^\]]+\]\((\S+)\.md\)', body, re.MULTILINE)
        if pages:
            result += ['', '```{toctree}', ':hidden:', f':caption: {caption}', '', *pages, '```']
    return '\n'.join(result) + '\n'


def read_page(app, name, source):
    """Adds the tables of contents; removes comments, and links to folders, which have no page."""
    del app
    text = re.sub(r'^<!-- .* -->\n', '', source[0], flags=re.MULTILINE)
    folder = (DOCS / name).parent
    text = LINK.sub(lambda x: x[1] if (folder / x[2]).is_dir() else x[0], text)
    source[0] = text + tables_of_contents(text) if name == 'index' else text


def reference_pages():
    """Returns the file names of the reference's pages, by header."""
    tags = os.environ.get('TROUPE_REFERENCE_TAGS')
    if not tags:
        return {}
    files = xml.etree.ElementTree.parse(tags).getroot().iterfind('compound[@kind="file"]')
    return {x.findtext('path') + x.findtext('name'): x.findtext('filename') for x in files}


def link_headers(app, doctree, name):
    """Makes links to headers lead to their pages of the reference."""
    prefix = '../' * app.builder.get_target_uri(name).count('/') + 'reference/'
    for link in list(doctree.findall(addnodes.download_reference)):
        path = (DOCS / name).parent.joinpath(link['reftarget']).resolve()
        if HEADERS not in path.parents:
            continue
        page = app.config.pages_of_headers.get(str(path))
        if page is None:
            LOG.warning('the reference has no page for %s', path.name, location=link)
            continue
        # Doxygen's tag files leave out the extension of the page.
        page = page if page.endswith('.html') else page + '.html'
        link.replace_self(nodes.reference('', '', *link.children, refuri=prefix + page))


def setup(app):
    app.add_config_value('pages_of_headers', reference_pages(), 'html')
    app.connect('source-read', read_page)
    app.connect('doctree-resolved', link_headers)
