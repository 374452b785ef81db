"""The site: `make site` builds it into build/site, with warnings as errors, and nothing in it asks the network."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

import ampwise  # noqa: E402

project = "ampwise"
author = "The ampwise authors"
copyright = author
version = release = ampwise.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "tools.site.links",
    "tools.site.mathml",
    "tools.site.sidebar",
]
exclude_patterns = ["conf.py", "images/*.py", "**/.ipynb_checkpoints"]
nitpicky = True
# Types of torch and of Python, whose pages lie elsewhere; and what is not of the public API.
nitpick_ignore_regex = [("py:.*", r"(?!ampwise\.[A-Za-z_]+$).*")]

# Pages

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

# The lesson, which is executed while the site is built

nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "auto"
nb_execution_timeout = 300
nb_execution_show_tb = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # they would come from elsewhere

# The API, from docstrings

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autosummary_generate = False
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# How it looks

html_theme = "furo"
html_title = f"ampwise {release}"
html_static_path = ["_static"]
html_css_files = ["ampwise.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
