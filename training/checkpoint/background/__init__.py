"""Saving while training goes on: a process per rank that writes what the rank has copied into shared memory.

    saver      the rank's side: copies, hands over, and hears what came of it
    process    the other side: writes the rank's file; beside rank 0 it also commits when all files are there

The process is a program of its own, without torch, started once and fed through shared memory: nothing is ever forked
from a process that has threads. Writers know of each other only through the files they leave, so that nothing of a save
needs the training processes after the copy.
"""
