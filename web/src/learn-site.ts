import { mount } from "svelte";
import "./app.css";
import LearnSite from "./LearnSite.svelte";

const target = document.getElementById("app");
if (target) mount(LearnSite, { target });
