"""One thin command per verb.

In: arguments. Out: calls into the rooms, and one clear line where a user erred. Never: logic.
"""
