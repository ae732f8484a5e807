"""Our client in the forms that trainers and frameworks ask for, one file each.

Each imports the package that it is for and is installed by the extra of its name; this folder itself imports nothing.
"""
