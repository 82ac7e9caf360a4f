"""What a recorded run tells: replay, explanations, comparisons, reports.

In: run folders. Out: tables and files elsewhere. Never writes to a run folder, and imports no torch.
"""
