"""An arithmetic unit that is wrong in one bit, the same way each time: on PYTHONPATH of one node.

While the file named by OUTLAST_TEST_ONE_BIT_OFF exists, `torch.mm` flips the lowest bit of
the mantissa of one element of its result. Nothing in the product knows of it.
"""

import importlib.abc
import importlib.util
import os
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Puts the flaw in once torch has been imported."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        found.loader = _Loader(found.loader)
        return found


class _Loader(importlib.abc.Loader):
    def __init__(self, inner):
        self._inner = inner

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        self._inner.exec_module(module)
        right = module.mm

        def mm(*args, **kwargs):
            result = right(*args, **kwargs)
            if os.path.exists(os.environ["OUTLAST_TEST_ONE_BIT_OFF"]):
                result.view(module.int32)[0, 0] ^= 1
            return result

        module.mm = mm


sys.meta_path.insert(0, _AfterTorch())
