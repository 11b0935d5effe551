"""What pyproject.toml cannot say: COMMLENS_BUILD_NATIVE adds the native engine to the package.

    COMMLENS_BUILD_NATIVE=1 pip install --no-build-isolation '.[native]'

compiles it against the torch that is installed already, which is why the build must not be isolated
from it.

    COMMLENS_BUILD_NATIVE=/builds python -m build --wheel

adds all builds that ``commlens build-native -o /builds`` has made for these sources, with several
versions of torch and Python.
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
        wanted = os.environ.get("COMMLENS_BUILD_NATIVE", "")
        if wanted in ("", "0"):
            return
        if self.editable_mode:
            print(
                "An editable installation has no place of its own for the native engine: commlens"
                " build-native builds it into a cache."
            )
            return
        sys.path.insert(0, str(Path(__file__).parent / "src"))
        from commlens.errors import NativeEngineError
        from commlens.native.build import build_into, copy_builds

        package = Path(self.build_lib) / "commlens" / "native" / "built"
        try:
            if wanted == "1":
                build_into(package)
            else:
                for build in copy_builds(Path(wanted).expanduser(), package):
                    print(
                        f"The wheel gets the native engine for torch {build.about['for']['torch']},"
                        f" {build.about['for']['python']}."
                    )
        except (ImportError, NativeEngineError) as error:
            raise SystemExit(f"COMMLENS_BUILD_NATIVE={wanted}: {error}") from None


setup(cmdclass={"build_py": BuildWithNative})
