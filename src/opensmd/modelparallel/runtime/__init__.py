"""The engine: runs a step's microbatches over the ranks of a pipeline without a server.

Every rank runs the user's step function. It executes what lives on it and holds placeholders for the rest.
All ranks pass the same program points in the same order, so that sender and receiver of every transfer know
of it without a word. docs/design/pipeline.md tells the whole story.
"""
