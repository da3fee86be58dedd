"""Compress-ratio experiments: what a schedule costs and what it loses, from a config file to a report.

``config`` reads and checks an experiment, ``units`` splits it into pieces of work, ``run`` does them (in ``worker``
processes) and keeps one record of each, ``report`` turns records into numbers and ``page`` shows the numbers.
"""
