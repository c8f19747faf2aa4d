// The formulas by themselves: a test loads this file in a browser and holds its numbers against oncurve.algos.
export * from "./advantages";
export * from "./loss";
export * from "./policy";
