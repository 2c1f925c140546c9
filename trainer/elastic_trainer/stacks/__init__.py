"""Adapters between training frameworks and the session, one module for each framework.

Each module imports its own framework, and no other part of `elastic_trainer` imports these modules.
"""
