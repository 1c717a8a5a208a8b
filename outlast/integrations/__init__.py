"""`outlast.session` for training frameworks, one module each: what a script imports of them.

Nothing of Outlast imports these modules: the framework that each needs is an extra.
"""
