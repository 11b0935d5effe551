"""What pyproject.toml cannot say: with COMMLENS_BUILD_NATIVE=1, an installation builds the native engine into the package.

    COMMLENS_BUILD_NATIVE=1 pip install --no-build-isolation '.[native]'

It is compiled against the torch that is installed already, which is why the build must not be isolated from it.
"""

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithNative(build_py):
    """Builds the package, and what was asked for by the environment."""

    def run(self) -> None:
        """Build."""
        super().run()
        if os.environ.get("COMMLENS_BUILD_NATIVE") != "1":
            return
        if self.editable_mode:
            print("An editable installation has no place of its own for the native engine: commlens build-native builds it into a cache.")
            return
        sys.path.insert(0, str(Path(__file__).parent / "src"))
        from commlens.errors import NativeEngineError
        from commlens.native.build import build_into

        try:
            build_into(Path(self.build_lib) / "commlens" / "native" / "built")
        except (ImportError, NativeEngineError) as error:
            raise SystemExit(f"COMMLENS_BUILD_NATIVE=1: {error}") from None


setup(cmdclass={"build_py": BuildWithNative})
