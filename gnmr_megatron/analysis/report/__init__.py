"""A run, or several, as one HTML page that works without a network.

In: run folders. Out: a file elsewhere. The page's own files are in `page`; nothing is drawn in Python.
"""

from gnmr_megatron.analysis.report.page import write_report as write_report
