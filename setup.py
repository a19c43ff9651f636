"""Compiles `batchstate/_core.py` where there is a C compiler. All else about the package stands in `pyproject.toml`.

`BATCHSTATE_COMPILED=1` makes a failure to compile an error, `BATCHSTATE_COMPILED=0` leaves the compiler out; without
either a machine that has no compiler gets the package all the same, and its core runs interpreted.
"""

import os
import sys
import sysconfig
import tempfile

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

SETTING = os.environ.get("BATCHSTATE_COMPILED")
STABLE_ABI = {"Py_LIMITED_API": "0x030b0000", "CYTHON_LIMITED_API": "1"}  # one binary for 3.11 and all later ones
DIRECTIVES = {
    "language_level": 3,
    # A mistake of ours is an exception, as it is where the file runs interpreted, never memory that is not ours. These
    # checks cost 0 to 1 us a step at one request and 5 to 9 at 256.
    "boundscheck": True,
    "initializedcheck": True,
    "nonecheck": True,
    "cdivision": False,  # quotients are those of Python
    "wraparound": False,  # no index counts from the end; one that would is an IndexError here
    "auto_pickle": False,  # a pool belongs to its process
    "emit_code_comments": False,
}

if SETTING not in (None, "0", "1"):
    sys.exit(f"environment variable BATCHSTATE_COMPILED: expected 0 or 1, got {SETTING!r}")

core = Extension(
    "batchstate._core",
    ["batchstate/_core.py"],
    define_macros=list(STABLE_ABI.items()),
    extra_compile_args=[] if sys.platform == "win32" else ["-O2", "-g0"],
    extra_link_args=["-Wl,--strip-all"] if sys.platform == "linux" else [],
    py_limited_api=True,
    optional=SETTING is None,
)
core.cython_directives, core.cython_c_in_temp = DIRECTIVES, True  # read by Cython, which setuptools calls


class Wheel(bdist_wheel):  # type: ignore[misc]  # no types to be had
    """Without a binary the wheel is for every platform, and its tag says so: an index or a cache hands it on."""

    def run(self) -> None:
        """Builds first, since only then it is known whether the core has compiled."""
        self.run_command("build")
        if not any(map(os.path.exists, self.get_finalized_command("build_ext").get_outputs())):
            self.distribution.ext_modules, self.root_is_pure = [], True
        super().run()


# A folder that is kept would bring modules along that are gone, and a binary of an older core.
scratch = tempfile.TemporaryDirectory()
options = {"build": {"build_base": scratch.name}, "bdist_wheel": {}}

# A free-threaded Python has no stable ABI: there the core runs interpreted.
if SETTING == "0" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    setup(options=options)
else:
    options["bdist_wheel"] = {"py_limited_api": "cp311"}
    setup(ext_modules=[core], options=options, cmdclass={"bdist_wheel": Wheel})
