"""Readers of measurements, one format a file. Each takes a path and returns records of calibration/records.py or rows;
each error is one InputError with file, row, value and mend. Start with parse.py, which all share.
"""
