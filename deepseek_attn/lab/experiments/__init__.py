"""Compress-ratio experiments: costs and quality of schedules, from a config file to a report.

``define`` reads and checks an experiment and splits it into units of work, ``measure`` measures one unit, ``run`` runs
all units in worker processes and keeps one record of each, ``report`` makes numbers, plots and a page of the records.
"""
