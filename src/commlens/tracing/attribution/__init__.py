"""Why a collective was issued: module, parameter, mesh dimension, pipeline stage, cause."""
