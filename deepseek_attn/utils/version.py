"""The version: `deepseek_attn.__version__`, the package's metadata and the command line read it here."""

__version__ = "0.2.0"
